"""``kvbench million``: decode steps of a real model over a long context in storage, beside what disk and compute allow.

K and V are those of a real prompt, tiled to the length that is asked for: the model's answer means nothing, but every
byte that a step reads and every product that it makes are those of a context of that length. They are put through a
client, which encodes them, and nothing of them is in memory when the steps begin.
"""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Durability, Outcome
from kvstore.engine.blocks import Block, BlockState
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.memory import Region
from kvstore.engine.model import ModelRunner
from kvstore.engine.params import SamplingParams, Selected
from kvstore.engine.sampling import Sampler
from kvstore.engine.scheduler import Share
from kvstore.engine.sequence import RequestId, Sequence
from kvstore.engine.step import build_step
from kvstore.engine.weights import Model, load_model
from kvstore.kernels import quant
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.paged import AttentionOptions, PagedBatch
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.rows import Row, median
from kvstore.tools.million.memory import processor_seconds
from kvstore.tools.million.needles import disk_bandwidth

PROMPT_BLOCKS: Final = 16
"""Blocks of real prefill that are tiled."""
PUT_BLOCKS: Final = 32
SAMPLE_BLOCKS: Final = 2048
"""Blocks in memory over which a layer's attention is timed."""
BUFFER_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """Length of the context, decode steps that are timed, and the share of blocks that selected attention reads."""

    tokens: int = 1_000_000
    steps: int = 5
    max_share: float = 0.05


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    nbytes: int
    waited_s: float
    processor_s: float


def run_million(folder: Path, model_folder: Path, effort: Effort) -> list[Row]:
    """All rows, with data in a folder under ``folder`` that is gone afterwards. Raises Unavailable."""
    model = load_model(model_folder, codec="int8")
    config = EngineConfig(name="million", kv_dtype="float16", host_share=0.0, running_max=1)
    spec = config.spec_for(model.spec)
    # What a model may be asked for is not what it was trained for: here its steps are timed, not its words.
    model.network.config.max_position_embeddings = max(model.positions_max, effort.tokens + 1024)
    blocks = -(-effort.tokens // spec.block_tokens)
    tokens, payloads = prefilled(model, spec)
    prompt = (tokens * (blocks // PROMPT_BLOCKS + 1))[: blocks * spec.block_tokens]
    layout = BlockLayout.of(spec)
    with TemporaryDirectory(prefix="kvbench-", dir=folder) as scratch:
        place = Path(scratch)
        ssd = str((blocks + 1024) * layout.stored_bytes * 5 // 4 + (1 << 30))
        flags = {"host": "512 MiB", "device": "64 MiB", "ssd": ssd, "ssd-dir": str(place / "ssd")}
        with DaemonProcess(place, {**flags, "ssd-free-floor": "256 MiB"}) as daemon:
            daemon.start()
            options = ClientOptions(name="million", strict=True, buffer_bytes=BUFFER_BYTES, timeout_s=600.0)
            with Client(daemon.socket, options) as client:
                fill(client, spec, prompt, payloads)
                exact = decode(Engine(model, client, config), [*prompt, tokens[0]], effort.steps, None, daemon.pid)
                asked = Selected(max_share=effort.max_share)
                chosen = decode(Engine(model, client, config), [*prompt, tokens[0]], effort.steps, asked, daemon.pid)
            disk = disk_bandwidth(place)
    compute = compute_seconds(model, spec, payloads, blocks)
    return _rows(effort, disk, compute, exact, chosen)


def prefilled(model: Model, spec: NamespaceSpec) -> tuple[list[int], list[memoryview]]:
    """Tokens of a real text, and K and V of each of its blocks, raw."""
    if model.text is None:
        raise Unavailable("the model has no tokenizer")
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    count = PROMPT_BLOCKS * spec.block_tokens
    tokens = model.text.encode(source.read_text(encoding="utf-8")[: 8 * count])[:count]
    if len(tokens) < count:
        raise Unavailable(f"{source} has {len(tokens)} tokens; {count} are needed")
    layout, params = BlockLayout.of(spec), SamplingParams()
    memory = torch.zeros(PROMPT_BLOCKS * layout.device_bytes, dtype=torch.uint8)
    region = Region(memory, layout.layers)
    sequence = Sequence(RequestId(0), tokens, count, params, Sampler(params), 0)
    for index in range(PROMPT_BLOCKS):
        sequence.table.append(Block(BlockState.PRIVATE, region, index * layout.device_bytes, Area.NONE))
    ModelRunner(model.network).run(build_step([Share(sequence, count)], spec))
    packed = memory.view(PROMPT_BLOCKS, -1)[:, : layout.layers * layout.raw_slice_stride]
    slices = packed.reshape(PROMPT_BLOCKS, layout.layers, -1)[:, :, : layout.raw_slice_bytes].contiguous()
    return tokens, [memoryview(block.flatten().numpy()) for block in slices]


def fill(client: Client, spec: NamespaceSpec, prompt: list[int], payloads: list[memoryview]) -> None:
    """Store the blocks of a prompt, and see them on SSD. Raises Unavailable if one was not stored."""
    namespace = client.open_namespace(spec).namespace_id
    keys = chain_keys(namespace, prompt, spec.block_tokens)
    parents = parents_of(keys)
    for begin in range(0, len(keys), PUT_BLOCKS):
        part = slice(begin, begin + PUT_BLOCKS)
        data = [payloads[index % PROMPT_BLOCKS] for index in range(begin, min(begin + PUT_BLOCKS, len(keys)))]
        # Durable, so that HOST is never full of what was not written yet.
        done = client.put(namespace, PutBlocks(keys[part], parents[part], data, durability=Durability.DURABLE))
        if set(done.outcomes) != {Outcome.HIT}:
            raise Unavailable(f"blocks {begin} on were not stored: {done.reasons}")


def decode(engine: Engine, prompt: list[int], steps: int, attention: Selected | None, daemon: int) -> list[_Step]:
    """Decode after a prompt that is stored. Of the steps the first, which finds it, is left out."""
    params = SamplingParams(tokens_max=steps + 2, ignore_eos=True, attention=attention)
    engine.add_request(prompt, params)
    found: list[_Step] = []
    counters = engine.counters
    while engine.has_work:
        before, waited, done = counters.bytes_attended["ssd"], counters.cold_wait_s, counters.tokens_generated
        processor, begun = processor_seconds(daemon), time.perf_counter()
        engine.step()
        if counters.tokens_generated > done:
            seconds = time.perf_counter() - begun
            read = counters.bytes_attended["ssd"] - before
            spent = processor_seconds(daemon) - processor
            found.append(_Step(seconds, read, counters.cold_wait_s - waited, spent))
    engine.close()
    if counters.tokens_computed > steps + 2 + 64:
        raise Unavailable(f"{counters.tokens_computed} tokens were computed: the prompt was not found in storage")
    return found[2:]


def compute_seconds(model: Model, spec: NamespaceSpec, payloads: list[memoryview], blocks: int) -> float:
    """What a step takes where all is in memory: attention over as many blocks, and the model beside it."""
    geometry = spec.geometry
    size, count = geometry.int8_bytes, min(SAMPLE_BLOCKS, blocks)
    raw = memoryview(payloads[0])[: geometry.raw_bytes]
    memory = torch.zeros(count, size, dtype=torch.uint8)
    for index in range(count):
        quant.quantise(raw, memory[index].numpy(), geometry, 1, strides=(geometry.raw_bytes, size))
    addresses = (memory.data_ptr() + torch.arange(count) * size)[None]
    starts = (torch.arange(count, dtype=torch.int32) * geometry.block_tokens)[None]
    context = torch.tensor([count * geometry.block_tokens], dtype=torch.int32)
    batch = PagedBatch(addresses, starts, torch.tensor([0, 1], dtype=torch.int32), context, geometry, "int8")
    heads = int(model.network.config.num_attention_heads)
    query = torch.randn(1, heads, geometry.head_dim)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        paged_attention(query, batch, AttentionOptions(geometry.head_dim**-0.5), layer=0)
        times.append(time.perf_counter() - begun)
    engine = Engine(model, None, EngineConfig(kv_dtype="float16"))
    engine.add_request([1] * 32, SamplingParams(tokens_max=6, ignore_eos=True))
    short = []
    while engine.has_work:
        begun = time.perf_counter()
        engine.step()
        short.append(time.perf_counter() - begun)
    engine.close()
    return median(times) * blocks / count * spec.layers + median(short[1:])


def _rows(effort: Effort, disk: float, compute: float, exact: list[_Step], chosen: list[_Step]) -> list[Row]:
    step, nbytes = median([one.seconds for one in exact]), median([float(one.nbytes) for one in exact])
    bound = max(nbytes / disk, compute)
    conditions = {
        "tokens": effort.tokens,
        "codec": "int8",
        "disk_gb_per_s": round(disk / 1e9, 3),
        "compute_s": round(compute, 3),
        "bytes_a_step": int(nbytes),
        "waited_s": round(median([one.waited_s for one in exact]), 3),
    }
    fast = median([one.seconds for one in chosen])
    few = median([float(one.nbytes) for one in chosen])
    return [
        Row(
            bench="million",
            case=f"exact decode step, {effort.tokens:,} tokens on SSD",
            value=step,
            unit="s",
            limit=bound,
            limit_unit="s",
            limit_name="max(bytes / disk bandwidth, compute)",
            target="<= 1.15 times it",
            conditions=conditions,
        ),
        Row(
            bench="million",
            case="processor time of engine and daemon a step",
            value=median([one.processor_s for one in exact]),
            unit="s",
            limit=compute,
            limit_unit="s of one thread or more",
            limit_name="attention and model, all in memory",
            conditions={"holds": "kernels, checksums, reads, and the control beside them"},
        ),
        Row(
            bench="million",
            case=f"selected, at most {effort.max_share:.0%} of the blocks",
            value=fast,
            unit="s",
            limit=step / 8,
            limit_unit="s",
            limit_name="an eighth of the exact step",
            target="at least 8 times faster",
            conditions={"bytes_a_step": int(few), "times_faster": round(step / fast, 2)},
        ),
    ]
