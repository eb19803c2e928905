"""The base install is enough for a client on the daemon's host; whoever needs more is told what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.tools.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]

EXTRAS = {
    "grpc", "grpc_health", "grpc_reflection", "pydantic", "typer", "rich", "prometheus_client", "torch", "transformers",
    "safetensors", "gguf", "tokenizers", "triton",
}  # fmt: skip

WITHOUT = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(EXTRAS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

ROUND_TRIP = """
import kvstore.client as client
for name in client.__all__:
    getattr(client, name)
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespaceSpec
spec = NamespaceSpec(model="thin", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_tokens=16)
keys = chain_keys(spec.namespace_id, range(32), 16)
layout = BlockLayout.of(spec)
payloads = [bytes([i + 1]) * (layout.layers * layout.raw_slice_bytes) for i in range(2)]
with client.Client(sys.argv[1], client.ClientOptions(strict=True)) as session:
    space = session.open_namespace(spec).namespace_id
    session.put(space, client.PutBlocks(keys, parents_of(keys), payloads))
    got = session.get(space, keys)
    print([bytes(p) == q for p, q in zip(got.payloads, payloads)])
"""


def without_extras(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments], capture_output=True, text=True, check=False
    )


def test_a_client_of_this_host_needs_no_extra():
    with (
        TemporaryDirectory(prefix="kvx-") as folder,
        DaemonProcess(Path(folder), {"device": "0", "host": "4 MiB"}) as one,
    ):
        one.start()
        done = without_extras(ROUND_TRIP, str(one.socket))
    assert (done.stdout.strip(), done.returncode) == ("[True, True]", 0), done.stderr


@pytest.mark.parametrize(
    ("command", "extra"), [("kvstored", "daemon"), ("kvctl", "cli"), ("kvengine", "engine"), ("kvbench", "daemon")]
)
def test_a_command_without_its_extra_names_it_in_one_line(command, extra):
    done = without_extras(f"from kvstore.tools import commands; commands.{command}()")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{command}: ")
    assert done.stderr.endswith(f"pip install 'tiered-kvstore[{extra}]'\n")


def test_grpc_without_its_extra_is_refused_by_name():
    done = without_extras("from kvstore.client import Client; Client('grpc://127.0.0.1:1')")
    assert "InvalidArgument" in done.stderr.splitlines()[-1]
    assert "tiered-kvstore[grpc]" in done.stderr.splitlines()[-1]


def test_the_base_install_is_what_was_said():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {text.split(">")[0] for text in project["dependencies"]}
    assert names == {"protobuf", "numpy", "crc32c", "lz4"}
    assert "protobuf>=6.33.5,<8" in project["dependencies"]
    for command, entry in project["scripts"].items():
        assert entry == f"kvstore.tools.commands:{command}"
