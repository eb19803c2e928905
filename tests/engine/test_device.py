"""The engine over a DEVICE arena on a GPU. There is none: the CUDA runtime and its memory are fake, the rest real."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.types import Area
from kvstore.daemon import daemon as daemon_module
from kvstore.daemon.build import build_tiers
from kvstore.daemon.config import Config
from kvstore.engine.blocks import Block, BlockState
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.memory import PrivatePool, Region
from kvstore.engine.model import ModelRunner
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.scheduler import Share
from kvstore.engine.sequence import Sequence
from kvstore.engine.step import build_step
from kvstore.tiers import device_cuda, device_ipc
from kvstore.tiers.device_probe import DeviceChoice
from tests.client.harness import daemon_thread
from tests.engine.families import Pair, build_pair, random_prompt
from tests.tiers.fake_cuda import FakeRuntime, tensor_of

GREEDY = SamplingParams(tokens_max=6, ignore_eos=True)
CUDA = DeviceChoice("cuda", "a fake one")
META = torch.device("meta")


@pytest.fixture(scope="module", params=["raw", "int8"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return build_pair("llama", codec=request.param)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The fake runtime, in the daemon's and the client's place alike."""
    fake = FakeRuntime()
    for module in (device_cuda, device_ipc):
        monkeypatch.setattr(module, "load_runtime", lambda: fake)
    monkeypatch.setattr(daemon_module, "build_tiers", partial(build_tiers, choose=lambda *_: CUDA))
    monkeypatch.setattr(device_ipc, "map_device", partial(device_ipc.map_device, as_tensor=tensor_of))
    return fake


@pytest.fixture
def client(runtime: FakeRuntime, pair: Pair) -> Iterator[Client]:
    """A client of a daemon with 12 blocks on the fake GPU and 64 in HOST."""
    block = 3 * 2 * 2 * 64 * 12 * 4
    with TemporaryDirectory(prefix="kvg-") as folder:
        config = Config(socket=Path(folder) / "s", device=12 * block, host=max(64 * 2 * block, 1 << 20))
        with daemon_thread(config), Client(config.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as found:
            yield found


def test_tokens_equal_transformers_and_cold_blocks_are_read_in_place(
    pair: Pair, client: Client, runtime: FakeRuntime
) -> None:
    prompts = [random_prompt(seed, 300) for seed in range(4)]
    engine = Engine(pair.model, client, EngineConfig(token_budget=128))
    answers = engine.generate(prompts, GREEDY)
    again = engine.generate(prompts[:1], GREEDY)
    assert engine.counters.blocks_demoted > 0
    assert sum(again[0].cached_tokens.values()) == 256
    # HOST of the daemon and of the client: two mappings of the same memory, both registered.
    assert len(runtime.registered) == 2
    if pair.model.spec.codec == "raw":
        expected = [pair.greedy(prompt, 6) for prompt in prompts]
        assert [answer.tokens for answer in [*answers, *again]] == [*expected, expected[0]]
    engine.close()
    del engine
    gc.collect()
    assert len(runtime.registered) == 1
    assert runtime.calls.count("cudaIpcOpenMemHandle") == runtime.calls.count("cudaIpcCloseMemHandle") == 1


def test_without_pinned_host_blocks_go_to_device_first(pair: Pair, client: Client, runtime: FakeRuntime) -> None:
    prompts = [random_prompt(seed, 300) for seed in range(4)]
    runtime.fail = "cudaHostRegister"
    engine = Engine(pair.model, client, EngineConfig(token_budget=128))
    answers = engine.generate(prompts, GREEDY)
    (again,) = engine.generate(prompts[:1], GREEDY)
    if pair.model.spec.codec == "raw":
        assert [answer.tokens for answer in answers] == [pair.greedy(prompt, 6) for prompt in prompts]
        assert again.tokens == answers[0].tokens
    assert engine.counters.blocks_demoted == 0
    assert sum(again.cached_tokens.values()) > 0
    engine.close()


def test_the_client_has_device_as_a_tensor_and_not_as_bytes(pair: Pair, client: Client) -> None:
    tensor = client.device_tensor()
    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    with pytest.raises(Unavailable, match="DEVICE is not mapped"):
        client.memory(Area.DEVICE)


def test_shared_memory_has_no_device_tensor(tmp_path: Path) -> None:
    config = Config(socket=tmp_path / "s", device="1 MiB", host="1 MiB", device_kind="shared")
    with daemon_thread(config):
        with Client(config.socket, ClientOptions(strict=True, buffer_bytes=4096)) as client:
            assert client.device_tensor() is None
        bare = ClientOptions(strict=True, buffer_bytes=4096, device=False)
        with Client(config.socket, bare) as client, pytest.raises(Unavailable, match="DEVICE"):
            client.device_tensor()


class TestWhichDevice:
    def test_a_wrong_word_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="auto, cpu or cuda"):
            EngineConfig(device="gpu")

    def test_cuda_without_a_gpu_is_refused(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(InvalidArgument, match="torch has no CUDA device"):
            Engine(pair.model, None, EngineConfig(device="cuda"))

    def test_cuda_over_shared_memory_is_refused(self, pair: Pair, tmp_path: Path) -> None:
        config = Config(socket=tmp_path / "s", device="1 MiB", host="1 MiB", device_kind="shared")
        options = ClientOptions(strict=True, buffer_bytes=4096)
        with daemon_thread(config), Client(config.socket, options) as client:
            with pytest.raises(InvalidArgument) as caught:
                Engine(pair.model, client, EngineConfig(device="cuda"))
            assert (caught.value.field, caught.value.expected) == ("config.device", "auto or cpu, where DEVICE lies")

    def test_another_device_later_is_a_cache_that_is_away(self, pair: Pair, client: Client) -> None:
        engine = Engine(pair.model, client, EngineConfig(retry_s=(0.0, 0.0)))
        engine._link._device = META
        engine._link.lose(Unavailable("for the test"))
        assert engine._link.attach() is False
        engine.close()


def test_all_tensors_of_a_step_are_on_its_device(pair: Pair) -> None:
    spec = pair.model.spec
    layout_bytes = 3 * 2 * 2 * 64 * 12 * 4
    region = Region(torch.empty(4 * layout_bytes, dtype=torch.uint8, device=META), spec.layers)
    assert region.device == META
    sequence = Sequence(1, random_prompt(1, 70), 70, GREEDY, None, 0, None)  # type: ignore[arg-type]
    for _ in range(2):
        sequence.table.append(Block(BlockState.PRIVATE, region, 4096, Area.NONE))
    step = build_step([Share(sequence, 70)], spec, META)
    batches = {id(batch): batch for layer in step.attention.batches for batch in layer}.values()
    tensors = [step.token_ids, step.positions, step.rows]
    tensors += [getattr(b, name) for b in batches for name in ("addresses", "starts", "query_offsets", "context_lens")]
    sequence.computed = 69
    decode = build_step([Share(sequence, 1)], spec, META)
    tensors += [tensor for scatter in decode.attention.writer._scatters for tensor in scatter]
    assert {tensor.device for tensor in tensors} == {META}


def test_a_step_on_a_gpu_has_ended_when_run_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Network:
        def to(self, device: torch.device) -> Network:
            events.append(f"to {device}")
            return self

        @property
        def base_model(self) -> Network:
            return self

        def __call__(self, **_: Any) -> Any:
            events.append("forward")
            return SimpleNamespace(logits=torch.zeros(1, 1, 5))

    stream = SimpleNamespace(synchronize=lambda: events.append("synchronised"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    runner = ModelRunner(Network(), torch.device("cuda", 1))
    step = SimpleNamespace(token_ids=None, positions=None, attention=None, rows=torch.zeros(0))
    assert runner.run(step).shape == (0, 0)  # type: ignore[arg-type]
    assert events == ["to cuda:1", "forward", "synchronised"]


def test_the_private_pool_lies_on_the_engines_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    real = torch.empty

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return real(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    layout = SimpleNamespace(device_bytes=4096, layers=1)
    pool = PrivatePool(layout, 8192, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert (pool.take(), pool.take(), pool.take()) == (0, 4096, None)
    assert made == [torch.device("cuda", 0)]
    pool.give_back(0)
    assert pool.take() == 0
