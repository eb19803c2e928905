"""K and V of a real prompt to be tiled to any length, and what a step over that length takes where all is in memory.

For benches: answers over tiled blocks mean nothing, their bytes and products are those of a real context.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from pathlib import Path
from typing import Final

import torch

from kvstore.core.errors import Unavailable
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area
from kvstore.engine.blocks import Block, BlockState
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.memory import Region
from kvstore.engine.model import ModelRunner
from kvstore.engine.params import SamplingParams
from kvstore.engine.sampling import Sampler
from kvstore.engine.scheduler import Share
from kvstore.engine.sequence import RequestId, Sequence
from kvstore.engine.step import build_step
from kvstore.engine.weights import Model
from kvstore.kernels import quant
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.paged import AttentionOptions, PagedBatch

PROMPT_BLOCKS: Final = 16
"""Blocks of real prefill that are tiled."""
SAMPLE_BLOCKS: Final = 2048
"""Blocks in memory over which a layer's attention is timed."""


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
    return statistics.median(times) * blocks / count * spec.layers + statistics.median(short[1:])
