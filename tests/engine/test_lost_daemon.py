"""A daemon dies, or its files are damaged, under a context that lies on its SSD: the answers are right, or none comes.

The context is a haystack for the needle model, so each token that is drawn is known to be right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.client import Backoff, Client, ClientOptions
from kvstore.core.clock import ManualClock
from kvstore.core.namespace import BlockLayout
from kvstore.engine.cold import Indices, Piece
from kvstore.engine.cold_plan import PlanReader
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine, TokenOutput
from kvstore.engine.forcing import Watched
from kvstore.engine.needle import Haystack, make_haystack, make_needle_model
from kvstore.engine.params import SamplingParams
from kvstore.engine.sequence import FinishReason
from kvstore.engine.weights import Model, load_model
from kvstore.tools.daemon_process import DaemonProcess

NEEDLES = 8
AT_TOKEN = 3
"""So many answers are there when it happens."""
CONFIG = EngineConfig(
    kv_dtype="float16", token_budget=1024, running_max=1, private_bytes=4 << 20, retry_s=(0.0, 0.05), device="cpu"
)
LENGTHS = [16_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
PLACES = ["between two steps", "inside a step"]

Event = Callable[[], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("needle")
    make_needle_model(folder, seed=1)
    return load_model(folder)


def needles(length: int) -> Haystack:
    return make_haystack(length, tuple(i / (NEEDLES - 1) for i in range(NEEDLES)), seed=length)


@contextmanager
def daemon_of(model: Model, length: int, folder: Path) -> Iterator[DaemonProcess]:
    """A daemon with a twentieth of the context on DEVICE and a tenth in HOST, on a short path, as sockets need."""
    layout, blocks = BlockLayout.of(CONFIG.spec_for(model.spec)), length // 64
    flags = {
        "device": str(blocks // 20 * layout.device_bytes),
        "host": str(blocks // 10 * layout.stored_bytes),
        "ssd": str(2 * blocks * layout.stored_bytes + (256 << 20)),
        "ssd-dir": str(folder),
        "ssd-free-floor": "0",
    }
    with TemporaryDirectory(prefix="kve-") as place, DaemonProcess(Path(place), flags) as daemon:
        daemon.start()
        yield daemon


@contextmanager
def engine_of(
    model: Model, daemon: DaemonProcess, cache_wait_s: float, clock: ManualClock | None = None
) -> Iterator[Engine]:
    options = ClientOptions(name="test", strict=True, backoff=Backoff(0.01, 0.05), buffer_bytes=4 << 20)
    with Client(daemon.socket, options) as client:
        engine = Engine(model, client, replace(CONFIG, cache_wait_s=cache_wait_s), clock)
        yield engine
        engine.close()


def damage(folder: Path) -> None:
    """Turn over 4 KiB at four places in the middle of a segment: layers alternate there by the MiB, or a part of it."""
    segment = max(folder.rglob("segment-*"), key=lambda path: path.stat().st_blocks)
    data = segment.read_bytes()
    middle = len(data.rstrip(b"\0")) // 2
    with segment.open("r+b") as file:
        for begin in range(middle, middle + (5 << 20), 5 << 18):
            file.seek(begin)
            file.write(bytes(byte ^ 0xFF for byte in data[begin : begin + 4096]))


class Happening:
    """Makes something happen once, after ``AT_TOKEN`` answers: between two steps, or when one has read two pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, event: Event) -> None:
        self._event: Event | None = event
        self._between, self._armed, self._pieces = place == PLACES[0], False, 0
        if not self._between:
            read = PlanReader.read

            def watched(reader: PlanReader, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
                for piece in read(reader, layer, chosen):
                    self._pieces += self._armed
                    if self._pieces == 2:
                        self._happen()
                    yield piece

            monkeypatch.setattr(PlanReader, "read", watched)

    def stepped(self, answers: int) -> None:
        """A step was done, and so many answers are there."""
        self._armed = answers >= AT_TOKEN
        if self._armed and self._between:
            self._happen()

    @property
    def happened(self) -> bool:
        return self._event is None

    def _happen(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event()


def ask(engine: Engine, haystack: Haystack, happening: Happening | None = None) -> tuple[list[int], list[TokenOutput]]:
    """Each key of the haystack after the other, in one request: what was answered, and the outputs."""
    keys, outputs = list(haystack.answers), list[TokenOutput]()
    watched = Watched(keys[1:] + keys[:1])
    engine.add_request(haystack.ask(keys[0]), SamplingParams(tokens_max=len(keys), ignore_eos=True), draw=watched)
    while engine.has_work:
        outputs += engine.step()
        if happening is not None:
            happening.stepped(len(watched.choices))
    assert happening is None or happening.happened
    return [choice.token for choice in watched.choices], outputs


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", PLACES)
def test_a_request_goes_on_from_storage_when_the_daemon_is_back(
    model: Model, place: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    haystack = needles(length)
    with daemon_of(model, length, tmp_path) as daemon, engine_of(model, daemon, cache_wait_s=600.0) as engine:

        def restart() -> None:
            assert engine.counters.bytes_attended["ssd"] > 0
            daemon.kill()
            daemon.start()

        answers, outputs = ask(engine, haystack, Happening(monkeypatch, place, restart))
        counters = engine.counters
    assert answers == list(haystack.answers.values())
    assert outputs[-1].reason is FinishReason.LENGTH
    assert outputs[-1].cached_tokens["ssd"] > length // 2
    assert counters.tokens_computed < 1.5 * length
    assert (counters.links_lost, counters.blocks_private) == (1, 0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", PLACES)
def test_a_request_ends_with_an_error_when_the_daemon_stays_away(
    model: Model, place: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    haystack = needles(length)
    right = list(haystack.answers.values())
    with daemon_of(model, length, tmp_path) as daemon, engine_of(model, daemon, cache_wait_s=0.0) as engine:
        answers, outputs = ask(engine, haystack, Happening(monkeypatch, place, daemon.kill))
        assert len(answers) >= AT_TOKEN
        assert answers == right[: len(answers)]
        assert (outputs[-1].token, outputs[-1].reason) == (None, FinishReason.CACHE)
        assert (engine.counters.links_lost, engine.counters.blocks_private) == (1, 0)
        daemon.start()
        while not engine.cache_is_up:
            engine.step()
        assert ask(engine, haystack)[0] == right


def test_a_request_waits_as_long_as_it_was_told(model: Model, tmp_path: Path) -> None:
    haystack, clock = needles(16_000), ManualClock()
    with daemon_of(model, 16_000, tmp_path) as daemon, engine_of(model, daemon, 60.0, clock) as engine:
        engine.add_request(haystack.ask(next(iter(haystack.answers))), SamplingParams(tokens_max=1))
        small = engine.add_request([1, 2, 3], SamplingParams(tokens_max=1, ignore_eos=True))
        engine.step()
        daemon.kill()
        outputs = []
        while not outputs:
            outputs += engine.step()
        assert [output.request_id for output in outputs] == [small]
        clock.advance(59.0)
        assert engine.step() == []
        clock.advance(1.0)
        assert [(output.token, output.reason) for output in engine.step()] == [(None, FinishReason.CACHE)]
        assert not engine.has_work


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", PLACES)
def test_segments_that_are_damaged_under_a_plan_change_no_answer(
    model: Model, place: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    haystack = needles(length)
    with daemon_of(model, length, tmp_path) as daemon, engine_of(model, daemon, cache_wait_s=0.0) as engine:
        answers, outputs = ask(engine, haystack, Happening(monkeypatch, place, lambda: damage(tmp_path)))
        damaged = daemon.status().counters["corrupt_blocks"]
    assert answers == list(haystack.answers.values())
    assert outputs[-1].reason is FinishReason.LENGTH
    assert damaged > 0
    assert engine.counters.steps_discarded > 0
