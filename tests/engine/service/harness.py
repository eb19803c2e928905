"""The service on a port of this process, over a small model and a store; clients are the real ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from openai import OpenAI

from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.service.app import Service
from kvstore.engine.service.driver import Driver
from kvstore.engine.service.limits import Limits
from kvstore.engine.service.metrics import Metrics
from kvstore.engine.weights import Model, load_model
from tests.engine.stores import Sizes, open_cache, open_store
from tests.engine.test_gguf import write_gguf


def tiny_model(folder: Path) -> Model:
    """A small Llama with a tokenizer of bytes and a chat template."""
    write_gguf(folder / "tiny.gguf", "llama")
    return load_model(folder / "tiny.gguf")


@dataclass(frozen=True)
class Served:
    """A service that runs, and where."""

    service: Service
    url: str

    def openai(self, key: str = "none") -> OpenAI:
        """The real client, which tries nothing twice."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def get(self, path: str) -> httpx2.Response:
        """A plain GET."""
        return httpx2.get(self.url + path, timeout=60)

    def metric(self, name: str, labels: dict[str, str] | None = None) -> float:
        """A value of /metrics; 0 where it was never counted."""
        return self.service.metrics.registry.get_sample_value(name, labels or {}) or 0.0


@contextmanager
def serving(model: Model, config: EngineConfig | None = None, **options: Any) -> Iterator[Served]:
    """Serve a model over a store of its own; ``options`` are fields of Limits, and ``keys``."""
    keys = options.pop("keys", ())
    config = config or EngineConfig(token_budget=64)
    with open_store(model.spec, Sizes(device=24, host=24)) as store, open_cache(store) as cache:
        engine = Engine(model, cache, config)
        limits, metrics = Limits(**options), Metrics(engine, config.token_budget)
        driver = Driver(engine, limits, metrics)
        service = Service(engine, model, driver, metrics, limits, "tiny", keys)
        driver.start()
        with _listening(service) as url:
            yield Served(service, url)
        driver.stop()
        engine.close()


@contextmanager
def _listening(service: Service) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
