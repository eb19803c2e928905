"""ENOSPC, EIO and stalls on real files: a tiny filesystem on a loop device, and calls that a preloaded library fails.

Both need something of the machine (root and loop devices; a C compiler) and are skipped, saying what, without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from kvstore.core.errors import TierFull
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()


@pytest.fixture
def tiny_filesystem(tmp_path):
    """12 MiB of ext4 of its own."""
    if os.geteuid() != 0 or shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a loop device needs root, losetup and mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate(12 << 20)
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"the loop device can not be mounted here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_real_full_filesystem_costs_misses_only(tiny_filesystem):
    """Writes are refused, reads go on, dropped space can be used, and all is there after a restart."""
    directory = str(tiny_filesystem / "ssd")
    config = SsdConfig(capacity_bytes=256 << 20, segment_bytes=1 << 20, commit_interval_s=None, compact_interval_s=None)
    tier = SsdTier(directory, config)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "real")
    written = {}

    def write(count: int) -> None:
        for seed in range(len(written), len(written) + count):
            (written[seed],) = tier.write(MAKER.namespace_id, MAKER.chain([seed], ROOT_PARENT), durable=False)

    with pytest.raises(TierFull):
        write(100_000)
    tier.flush()
    kept = dict(written)
    tier.drop([kept.pop(seed) for seed in range(len(written) // 2)])
    assert tier.reclaim(1 << 20) > 0
    write(50)
    tier.flush()
    tier.close()
    tier = SsdTier(directory, config)
    found = {one.key: one.handle for one in tier.recover()}
    assert {MAKER.key(seed) for seed in kept} <= found.keys()
    for key in (MAKER.key(seed) for seed in list(kept)[:200]):
        into = memoryview(bytearray(MAKER.layout.stored_bytes))
        assert tier.read([BlockRead(found[key], key, into)]) == [ReadStatus.OK]
    tier.close()


LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* FAULT_FILE holds: nothing (pass), "eio NAME" or "stall NAME" for one call by name. */
#include <stdio.h>
#include <string.h>
static int fault(const char *name) {
    for (;;) {
        char text[64] = "";
        FILE *file = fopen(getenv("FAULT_FILE"), "r");
        if (file) { if (!fgets(text, sizeof text, file)) text[0] = 0; fclose(file); }
        char *word = strchr(text, ' ');
        if (!word || strncmp(word + 1, name, strlen(name))) return 0;
        if (!strncmp(text, "eio", 3)) { errno = EIO; return 1; }
        usleep(2000);
    }
}
#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))
int fdatasync(int fd) { return fault("fdatasync") ? -1 : REAL(int (*)(int), "fdatasync")(fd); }
#define VECTOR(name, alias) \
    ssize_t alias(int fd, const struct iovec *v, int n, off_t at) { \
        return fault(name) ? -1 : REAL(ssize_t (*)(int, const struct iovec *, int, off_t), #alias)(fd, v, n, at); }
VECTOR("pwritev", pwritev)
VECTOR("pwritev", pwritev64)
VECTOR("preadv", preadv)
VECTOR("preadv", preadv64)
#define VECTOR2(name, alias) \
    ssize_t alias(int fd, const struct iovec *v, int n, off_t at, int flags) { \
        return fault(name) ? -1 \
            : REAL(ssize_t (*)(int, const struct iovec *, int, off_t, int), #alias)(fd, v, n, at, flags); }
VECTOR2("pwritev", pwritev2)
VECTOR2("pwritev", pwritev64v2)
VECTOR2("preadv", preadv2)
VECTOR2("preadv", preadv64v2)
"""

SCRIPT = """
import os, sys
from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

def fault(text):
    with open(os.environ["FAULT_FILE"] + ".new", "w") as file:
        file.write(text)
    os.replace(os.environ["FAULT_FILE"] + ".new", os.environ["FAULT_FILE"])

maker = BlockMaker()
fault("")
tier = SsdTier(sys.argv[1], SsdConfig(capacity_bytes=64 << 20, io_deadline_s=0.2, compact_interval_s=None,
                                      commit_interval_s=None, header_cache_bytes=0, read_errors_max=1))
list(tier.recover())
tier.put_namespace(maker.spec, NamespacePolicy(), "real")
block = maker.block(1, ROOT_PARENT)
(handle,) = tier.write(maker.namespace_id, [block], durable=True)

def write(seed):
    tier.write(maker.namespace_id, maker.chain([seed], ROOT_PARENT), durable=True)

def read():
    into = memoryview(bytearray(len(block.stored)))
    (status,) = tier.read([BlockRead(handle, block.key, into)])
    if status is ReadStatus.OK and into != block.stored:
        raise SystemExit("wrong bytes")
    return status

seed = 10
for kind in ("eio", "stall"):
    for call in ("pwritev", "fdatasync", "preadv"):
        fault(f"{kind} {call}")
        if call == "preadv":
            if read() is not ReadStatus.UNAVAILABLE:
                raise SystemExit(f"{kind} {call}: a read was answered")
        else:
            try:
                write(seed)
                raise SystemExit(f"{kind} {call}: a write was acknowledged")
            except TierUnavailable:
                pass
        if tier.state.state != "degraded":
            raise SystemExit(f"{kind} {call}: not degraded")
        fault("")
        while not tier.probe():
            pass
        seed += 1
        write(seed)
        if read() is not ReadStatus.OK:
            raise SystemExit(f"{kind} {call}: not back")
tier.close()
print("good")
"""


def test_real_calls_that_fail_and_stall(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("building the preloaded library needs a C compiler")
    source, library = tmp_path / "faults.c", tmp_path / "faults.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "FAULT_FILE": str(tmp_path / "fault"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "ssd")],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "good", done.stdout + done.stderr
