"""A model and an engine as the options say, and what ends either of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from transformers.utils.logging import disable_progress_bar

from kvstore.cache import Cache
from kvstore.client import Client, ClientOptions
from kvstore.core.decoders import UnsupportedModel
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.link import cuda_device
from kvstore.engine.weights import Model, load_model, use_threads
from kvstore.tools.kvengine.embedded import embedded_cache
from kvstore.tools.kvengine.options import EngineOptions
from kvstore.tools.output import Printer

OK: Final = 0
STARVED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
UNSUPPORTED: Final = 4
INTERRUPTED: Final = 130


def ended(command: Callable[[], int], printer: Printer) -> int:
    """Run a command; what it raises becomes one line and the exit code that is documented for it."""
    try:
        return command()
    except UnsupportedModel as error:
        printer.talk(f"error: {error}", style="red")
        return UNSUPPORTED
    except InvalidArgument as error:
        printer.talk(f"error: {error}", style="red")
        return USAGE
    except OSError as error:
        where = "" if error.filename is None else f"{str(error.filename)[:200]!r}: "
        printer.talk(f"error: {where}{error.strerror or error}", style="red")
        return USAGE
    except KeyboardInterrupt:
        printer.talk("kvengine: interrupted")
        return INTERRUPTED
    except Unavailable as error:
        printer.talk(f"error: {error}", style="red")
        return UNREACHABLE
    except KVStoreError as error:
        printer.talk(f"error: {error}", style="red")
        return STARVED


@contextmanager
def opened_engine(options: EngineOptions, printer: Printer) -> Iterator[tuple[Engine, Model]]:
    """The engine over its cache, both closed at the end."""
    if options.device == "cuda":
        # Before the model is loaded, which takes long.
        cuda_device("--device")
    if options.threads is not None:
        use_threads(options.threads)
    with _cache(options) as cache:
        printer.talk(f"loading {options.model}")
        disable_progress_bar()
        model = load_model(options.model, dtype=options.dtype, codec=options.codec, salt=options.salt.encode())
        engine = Engine(model, cache, _config(options))
        try:
            yield engine, model
        finally:
            engine.close()


def _config(options: EngineOptions) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        kv_dtype=options.kv_dtype or None,
        token_budget=options.token_budget,
        running_max=options.running_max,
        schedule=options.schedule,
        host_share=options.host_share,
        hot_bytes=options.hot_mib << 20,
        cache_wait_s=options.cache_wait_s,
        raw_layers=options.raw_layers,
        raw_first_tokens=options.raw_first_tokens,
        recent_raw_tokens=options.recent_raw_tokens,
        policy=NamespacePolicy(lossless=options.lossless) if options.lossless else None,
        device_codec=None if options.device_codec == "raw" else options.device_codec,
        name="kvengine",
    )


@contextmanager
def _cache(options: EngineOptions) -> Iterator[Cache]:
    if options.socket is None:
        with embedded_cache(options.device_mib, options.host_mib, options.ssd, options.ssd_mib) as cache:
            yield cache
        return
    # Strict, since the engine itself turns failures of the cache into recomputation, and must see them for that.
    with Client(options.socket, ClientOptions(name="kvengine", strict=True)) as client:
        yield client
