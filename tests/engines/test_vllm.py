"""Real vLLM on the CPU gives the same tokens with the connector as without, whatever becomes of the daemon."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.engines.vllm_process import EngineProcess

pytest.importorskip("vllm")
from kvstore.tools.daemon_process import DaemonProcess  # noqa: E402  after the skip

BLOCK = 32
DEADLINE = 3.0
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def prompt(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, 512) for _ in range(tokens)]


def usable(tokens: int) -> int:
    """Tokens of a prompt that can be loaded: whole blocks, and one token is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


PROMPTS = [prompt(1, 330), prompt(2, 200), prompt(1, 330)[:170] + prompt(3, 100)]


@pytest.fixture(scope="module")
def daemon(kvstored) -> Iterator[DaemonProcess]:
    with TemporaryDirectory(prefix="kvv-") as folder:
        flags = {"device": "0", "host": "256 MiB", "ssd": "512 MiB", "ssd-dir": f"{folder}/ssd", "ssd-free-floor": "0"}
        with DaemonProcess(Path(folder), flags, kvstored) as found:
            found.start()
            yield found


@pytest.fixture(scope="module")
def expected(tiny_model, tmp_path_factory) -> list[list[int]]:
    """What vLLM answers without a connector."""
    engine = EngineProcess(tiny_model, tmp_path_factory.mktemp("alone") / "log", None, block_size=BLOCK)
    answers = [engine.generate([one])["tokens"][0] for one in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == 3
    engine.close()
    return answers


@pytest.fixture
def start(tiny_model, daemon, tmp_path):
    """Starts engines with the connector."""
    begun: list[EngineProcess] = []

    def make(log: str = "log", extra=None, **settings) -> EngineProcess:
        told = {"socket": str(daemon.socket), "deadline_s": DEADLINE, **(extra or {})}
        engine = EngineProcess(tiny_model, tmp_path / log, told, **{"block_size": BLOCK, **settings})
        begun.append(engine)
        return engine

    yield make
    for engine in begun:
        engine.close()


def test_cold_warm_in_a_fresh_process_from_ssd_and_whatever_becomes_of_the_daemon(start, daemon, expected):
    first = start("first")
    for number, one in enumerate(PROMPTS):
        answer = first.generate([one])
        assert answer["tokens"] == [expected[number]]
        # The third begins as the first does.
        assert answer["hits"] == (160 if number == 2 else 0)
    first.close()

    engine = start("second")

    def check(number: int, hits: int | None, **more) -> dict:
        answer = engine.generate([PROMPTS[number]], **more)
        assert answer["tokens"] == [expected[number]]
        if hits is not None:
            assert answer["hits"] == hits
        return answer

    # Warm from HOST in a fresh process, and all at one time.
    for number, one in enumerate(PROMPTS):
        check(number, usable(len(one)))
    assert engine.generate(PROMPTS)["tokens"] == expected
    # What was loaded is what is computed with: zeros in its place change the answer.
    assert engine.generate([PROMPTS[0]], trick="zeros")["tokens"] != [expected[0]]
    check(0, usable(330))

    # From SSD after a restart: loaded between steps.
    daemon.stop()
    daemon.start()
    until_hits(engine, 1, expected)
    check(0, usable(330))

    # Killed before the lookup, between lookup and load, and while it loads.
    daemon.kill()
    check(0, 0)
    for trick in ("killed after lookup", "killed while loading"):
        daemon.kill()
        daemon.start()
        until_hits(engine, 1, expected)
        check(2, None, trick=trick, pid=daemon.pid)
    daemon.kill()
    daemon.start()
    until_hits(engine, 1, expected)

    # A daemon that hangs for the whole of several requests: one deadline, and none after it.
    quick = check(1, usable(200))["first"][0]
    os.kill(daemon.pid, signal.SIGSTOP)
    begun = time.monotonic()
    for _ in range(3):
        check(0, 0)
    hung = time.monotonic() - begun
    os.kill(daemon.pid, signal.SIGCONT)
    assert hung < 60 + 2 * DEADLINE
    assert quick > 0
    until_hits(engine, 1, expected)

    # Bytes that change on SSD are found by their checksum; the block is computed again.
    daemon.stop()
    changed = corrupt(daemon.socket.parent / "ssd")
    assert changed
    daemon.start()
    until_hits(engine, 1, expected)
    for number in range(3):
        check(number, None)
    assert daemon.status().counters["ssd_quarantined"] > 0
    assert "are computed again" in engine.said


def until_hits(engine: EngineProcess, hits: int, expected: list[list[int]]) -> None:
    """Ask until the engine has its connection again."""
    for _ in range(20):
        answer = engine.generate([PROMPTS[1]])
        assert answer["tokens"] == [expected[1]]
        if answer["hits"] >= hits:
            return
    raise AssertionError("the engine found nothing again")


def corrupt(folder: Path) -> int:
    """Change bytes in the middle of each block of 20 KiB that is not zero, in every file of slots."""
    changed = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size < 1 << 20:
            continue
        with path.open("r+b") as file:
            for at in range(0, path.stat().st_size, 1 << 15):
                file.seek(at + 20000)
                found = file.read(8)
                if any(found):
                    file.seek(at + 20000)
                    file.write(bytes(byte ^ 0xFF for byte in found))
                    changed += 1
    return changed


def test_loads_between_steps_and_another_block_size(start, expected):
    engine = start(extra={"loads": "between"}, block_size=64)
    for number in range(3):
        assert engine.generate([PROMPTS[number]])["tokens"] == [expected[number]]
    assert engine.generate(PROMPTS)["tokens"] == expected
    again = engine.generate([PROMPTS[0]])
    assert (again["tokens"], again["hits"]) == ([expected[0]], 320)


def test_a_small_cache_with_preemption_and_two_engines_at_once(start, tiny_model, tmp_path, expected):
    prompts = [prompt(seed, 500) for seed in range(20, 24)]
    alone = EngineProcess(tiny_model, tmp_path / "alone", None, block_size=BLOCK)
    wanted = [alone.generate([one], tokens=60)["tokens"][0] for one in prompts]
    alone.close()
    small = {"num_gpu_blocks_override": 40, "max_model_len": 1024}
    engines = [start("left", **small), start("right", **small)]
    for _ in range(2):
        for engine in engines:
            engine.begin(prompts=prompts, tokens=60)
        for engine in engines:
            assert engine.answer()["tokens"] == wanted


def test_another_dtype_shares_nothing_and_the_log_says_why(start, expected):
    start("float32").generate([PROMPTS[0]])
    engine = start("bfloat16", dtype="bfloat16")
    assert engine.generate([PROMPTS[0]])["hits"] == 0
    assert "nothing of this model fits what is served here" in engine.said
    assert "blocks that differ in dtype" in engine.said


def test_two_tensor_parallel_ranks(start, tiny_model, tmp_path):
    alone = EngineProcess(tiny_model, tmp_path / "alone", None, block_size=BLOCK, tensor_parallel_size=2)
    wanted = [alone.generate([one])["tokens"][0] for one in PROMPTS]
    alone.close()
    engine = start(tensor_parallel_size=2)
    assert [engine.generate([one])["tokens"][0] for one in PROMPTS] == wanted
    warm = [engine.generate([one]) for one in PROMPTS]
    assert [one["tokens"][0] for one in warm] == wanted
    assert [one["hits"] for one in warm] == [usable(len(one)) for one in PROMPTS]
