"""``kvctl export`` and ``import`` move a namespace between two daemons, whole or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT, BlockKey, Codec, Outcome
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvctl.archive import ArchiveReader, ArchiveWriter
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.export import parents_first
from kvstore.tools.kvctl.main import main
from kvstore.v1 import admin_pb2
from kvstore.wire import messages

STRICT = ClientOptions(strict=True, buffer_bytes=8 << 20)
SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 16, "block_tokens": 16}
SPECS = {
    "raw": NamespaceSpec(model="raw", dtype="float16", salt=b"tenant", **SHAPE),
    "int8": NamespaceSpec(model="int8", dtype="float32", codec="int8", raw_layers=(1,), **SHAPE),
    "opaque": NamespaceSpec(model="opaque", dtype="opaque", opaque_slice_bytes=1000, **SHAPE),
}


@pytest.fixture
def daemons():
    with TemporaryDirectory(prefix="kva-") as folder:
        made = []
        for name in ("one", "two"):
            place = Path(folder) / name
            place.mkdir()
            flags = {
                "device": "0",
                "host": "16 MiB",
                "ssd": "64 MiB",
                "ssd-free-floor": "0",
                "ssd-dir": str(place / "ssd"),
            }
            made.append(DaemonProcess(place, flags))
            made[-1].start()
        yield made
        for daemon in made:
            daemon.stop()


@pytest.fixture
def kvctl(capsys, monkeypatch):
    def run(daemon, *words):
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["kvctl", *map(str, words), "--socket", str(daemon.socket)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def fill(client, spec):
    """Two chains with their first block in common; the keys of what is stored."""
    policy = NamespacePolicy(raw_first_tokens=16 if spec.codec == "int8" else 0)
    opened = client.open_namespace(spec, name=spec.model, policy=policy)
    nbytes, chance, stored = opened.layout.layers * opened.layout.raw_slice_bytes, np.random.default_rng(1), []
    for tail in (1, 2):
        keys = chain_keys(opened.namespace_id, [7] * 16 + [tail] * 64, 16)
        dtype = np.float32 if spec.dtype == "float32" else np.float16
        payloads = [chance.standard_normal(nbytes // dtype().nbytes).astype(dtype).tobytes() for _ in keys]
        done = client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), payloads))
        assert set(done.outcomes) == {Outcome.HIT}
        stored += [key for key in keys if key not in stored]
    return opened.namespace_id, stored


@pytest.mark.parametrize("name", SPECS)
def test_a_namespace_moves_to_another_daemon(kvctl, tmp_path, daemons, name):
    one, two = daemons
    spec, file = SPECS[name], tmp_path / "archive"
    with Client(one.socket, STRICT) as client:
        namespace_id, keys = fill(client, spec)
        here = client.get(namespace_id, keys)
        code, out, err = kvctl(one, "export", name, file, "-o", "json")
        assert code == Exit.OK, err
        assert (json.loads(out)["blocks"], json.loads(out)["left_out"]) == (9, 0)
    code, out, err = kvctl(two, "import", file, "--durable", "-o", "json")
    assert code == Exit.OK, err
    assert json.loads(out) == {"blocks": 9, "stored": 9, "existed": 0, "missed": 0}
    with Client(two.socket, STRICT) as client:
        assert client.open_namespace(spec).namespace_id == namespace_id
        there = client.get(namespace_id, keys)
    assert there.codecs == here.codecs
    assert set(here.codecs) == ({Codec.RAW, Codec.INT8} if name == "int8" else {Codec.RAW})
    for mine, yours, codec in zip(here.payloads, there.payloads, here.codecs, strict=True):
        assert len(mine) == len(yours)
        # What is encoded was decoded for the way, and is encoded anew: most numbers stay as they are.
        same = np.mean(np.frombuffer(mine, np.uint8) == np.frombuffer(yours, np.uint8))
        assert same == 1 if codec is Codec.RAW else same > 0.9
    code, out, _ = kvctl(two, "import", file)
    assert (code, "9 were here already" in out) == (Exit.OK, True)


def test_of_a_damaged_file_nothing_is_put(kvctl, tmp_path, daemons):
    one, two = daemons
    file, broken, chance = tmp_path / "archive", tmp_path / "broken", random.Random(3)
    with Client(one.socket, STRICT) as client:
        fill(client, SPECS["opaque"])
        assert kvctl(one, "export", "opaque", file)[0] == Exit.OK
    whole = file.read_bytes()
    changed = []
    for _ in range(40):
        flipped, at = bytearray(whole), chance.randrange(len(whole))
        flipped[at] ^= 1 << chance.randrange(8)
        changed.append(bytes(flipped))
    cuts = [whole[: chance.randrange(len(whole))] for _ in range(10)]
    for data in [*changed, *cuts, whole[:-1], whole + b"x", b"", whole[:200] + whole[300:]]:
        broken.write_bytes(data)
        code, _, said = kvctl(two, "import", broken)
        assert (code, "FILE is" in said) == (Exit.USAGE, True)
    assert json.loads(kvctl(two, "ls", "-o", "json")[1]) == {"namespaces": []}


def test_every_bit_of_an_archive_counts(tmp_path):
    spec, path = SPECS["opaque"], tmp_path / "archive"
    layout = BlockLayout.of(spec)
    info = admin_pb2.NamespaceInfo(namespace_id=spec.namespace_id, name="n", spec=messages.spec_message(spec))
    key = BlockKey(b"k" * 32)

    def written(*blocks):
        path.unlink(missing_ok=True)
        with ArchiveWriter(path, info) as archive:
            for block in blocks:
                archive.add(*block)
            archive.finish()
        return path.read_bytes()

    def refused(data):
        path.write_bytes(data)
        with ArchiveReader(path) as archive, pytest.raises(InvalidArgument, match="FILE"):
            archive.verify(lambda *_: None)

    raw = memoryview(bytes(layout.layers * layout.raw_slice_bytes))
    whole = written((key, ROOT_PARENT, Codec.RAW, raw))
    heads = [*range(300), *range(len(whole) - 40, len(whole))]
    for bit in (8 * at + i for at in heads if at < len(whole) for i in range(8)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped))
    # Whole files that no export writes.
    refused(written((key, b"p" * 32, Codec.RAW, raw)))
    refused(written((key, ROOT_PARENT, Codec.RAW, raw[:-1])))
    refused(written((key, ROOT_PARENT, 77, raw)))


def test_a_file_that_is_there_is_not_touched_and_a_failure_leaves_none(kvctl, tmp_path, daemons):
    one, _ = daemons
    file = tmp_path / "archive"
    file.write_text("mine")
    with Client(one.socket, STRICT) as client:
        fill(client, SPECS["opaque"])
        code, _, said = kvctl(one, "export", "opaque", file)
        assert (code, "does not exist yet" in said, file.read_text()) == (Exit.USAGE, True, "mine")
        assert kvctl(one, "export", "no such", tmp_path / "new")[0] == Exit.NOT_FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_parents_come_first_and_what_hangs_below_no_root_is_told():
    root, gone = bytes(32), b"g" * 32
    keys = [bytes([number]) * 32 for number in range(1, 6)]
    order, orphans = parents_first({keys[2]: keys[1], keys[1]: keys[0], keys[0]: root, keys[3]: gone, keys[4]: keys[3]})
    assert order == [(keys[0], root), (keys[1], keys[0]), (keys[2], keys[1])]
    assert sorted(orphans) == [keys[3], keys[4]]
