"""The page of the metrics port: what it is given, that it tells nothing of a tenant, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.types import Target
from kvstore.daemon.config import Config
from kvstore.daemon.live import page
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec
from tests.daemon.ground import ask

MIB = 1 << 20
BROWSER: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, list[str]]]:
    """The port, and what must never be told."""
    folder = tmp_path_factory.mktemp("p")
    config = Config(
        socket=folder / "s", device=0, host=4 * MIB, ssd=64 * MIB, ssd_dir=folder / "ssd", ssd_free_floor=0,
        ssd_segment=MIB, metrics_listen="0", grpc=False,
    )  # fmt: skip
    options = ClientOptions(strict=True, buffer_bytes=MIB, name="hersession")
    with daemon_thread(config) as daemon, Client(config.socket, options) as client:
        opened = client.open_namespace(small_spec(model="secretmodel", salt=b"secretsalt"), name="secretname")
        keys, _ = chain(opened.namespace_id, 5)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        client.match(opened.namespace_id, chain(opened.namespace_id, 8)[0])
        lease = client.grant_lease("herlease", 30_000)
        client.fetch(opened.namespace_id, keys, Target.IN_PLACE, lease_id=lease)
        secrets = ["secretmodel", "secretsalt", "secretname", "hersession", "herlease", opened.namespace_id.hex()[:8]]
        yield daemon.metrics_port, [*secrets, *(key.hex()[:8] for key in keys)]


def test_the_values_are_the_daemons(served: tuple[int, list[str]]):
    status, text = ask(served[0], "/live.json")
    assert status == 200
    now = json.loads(text)
    assert (now["found"], now["missed"], now["put"]["new"]) == (5, {"never_stored": 3}, 5)
    tiers = {tier["name"]: tier for tier in now["tiers"]}
    assert (tiers["HOST"]["blocks"], tiers["HOST"]["found"], tiers["HOST"]["capacity"]) == (5, 5, 4 * MIB)
    assert tiers["HOST"]["pinned"] > 0
    (namespace,) = now["namespaces"]
    assert namespace == {"number": 1, "blocks": 5, "brought": 5, "evicted": 0}
    (tree,) = now["trees"]
    assert [(node["level"], node["tokens"], node["blocks"], node["hits"]) for node in tree["nodes"]] == [(0, 80, 5, 2)]
    assert {(edge["source"], edge["target"]) for edge in now["edges"]} >= {("buffer", "host")}


def test_nothing_of_a_tenant_is_told(served: tuple[int, list[str]]):
    port, secrets = served
    for path in ("/", "/live.json"):
        text = ask(port, path)[1]
        assert not [secret for secret in secrets if secret in text]


def test_the_page_loads_nothing_from_elsewhere():
    text = page().decode()
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", text)
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in text


@pytest.mark.skipif(BROWSER is None, reason="no headless Chromium: apt install chromium")
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_a_browser_shows_it(served: tuple[int, list[str]], tmp_path: Path, width: int):
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom",
        f"--window-size={width},2000", "--virtual-time-budget=3000", f"http://127.0.0.1:{served[0]}/",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    body = re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL)
    shown = " ".join(re.sub(r"<[^>]+>", " ", body).split())
    for part in ("HOST", "4 MiB", "5 of 8 blocks asked for", "63 %", "never stored 3", "Namespace #1", "buffer → host"):
        assert part in shown
    assert 'id="lost" style="display: none' in body
