"""Speed of the Triton kernels: bytes a second, each beside a copy of the same kind measured in the same run.

Every figure is the median of several samples over more memory than the caches hold. On a GPU a sample is some replays
of a graph, so that it holds the device's time and not Python's. On a CPU (Triton's
interpreter) the same code runs on tiny sizes, so that the tests execute it; its figures then mean nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvstore.kernels import triton_attention, triton_move, triton_quant
from kvstore.kernels.gpu_cases import QUERY_DTYPES, row_addresses
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch

__all__ = ["Row", "Sizes", "benchmarks", "sizes_for"]

REPLAYS = 4
"""Replays in one timed sample: the gap before the first one is shared by all."""

SPLITS = (16, 33, 66, 132)
"""Shares tried for one long sequence, to see whether the default is well chosen."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: ``limit`` is the same unit's value of a plain copy, or of ``limit_name``; 0 where there is none."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float = 0.0
    limit_name: str = "device copy"

    @property
    def fraction(self) -> float:
        """Value over limit; 0 where there is no limit."""
        return self.value / self.limit if self.limit else 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work: tokens of the long context, sequences and tokens of the batch, bytes of copies, launches timed."""

    long_tokens: int
    batch: int
    batch_tokens: int
    prefill_tokens: int
    copy_bytes: int
    repeats: int


def sizes_for(device: torch.device) -> Sizes:
    """Sizes that fit the device's free memory: full ones from 8 GiB on; tiny ones on a CPU."""
    if device.type == "cpu":
        return Sizes(128, 2, 64, 64, 1 << 16, 1)
    free = torch.cuda.mem_get_info(device)[0]
    share = 1 if free >= 8 << 30 else 4
    return Sizes(131_072 // share, 16, 8_192 // share, 2_048, (1 << 30) // share, 20)


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``run`` over ``repeats`` samples."""
    if device.type == "cuda":
        return _device_seconds(run, repeats)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def _device_seconds(run: Callable[[], object], repeats: int) -> float:
    """The device's time of one ``run``, which is compiled and warmed up first, then captured and replayed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for _ in range(REPLAYS):
            graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(float(events[0].elapsed_time(events[1])) / 1000 / REPLAYS)
    return statistics.median(times)


def make_batch(rows: torch.Tensor, geometry: SliceGeometry, codec: str, sequences: int, queries: int) -> PagedBatch:
    """Deal the blocks of ``rows`` out to sequences in a shuffled order, each full, with ``queries`` queries each."""
    device = rows.device if rows.is_cuda else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = rows.shape[0] // sequences
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(rows.shape[0], generator=generator)[: sequences * blocks].view(sequences, blocks)
    starts = torch.arange(blocks, dtype=torch.int32) * geometry.block_tokens
    return PagedBatch(
        (rows.data_ptr() + rows.shape[1] * order).to(device),
        starts.repeat(sequences, 1).to(device),
        torch.arange(sequences + 1, dtype=torch.int32, device=device) * queries,
        torch.full((sequences,), blocks * geometry.block_tokens, dtype=torch.int32, device=device),
        geometry,
        codec,
    )


def raw_blocks(blocks: int, geometry: SliceGeometry, device: torch.device) -> torch.Tensor:
    """Random raw blocks of one layer, uint8 [blocks, stride]."""
    rows = torch.empty(blocks, geometry.slice_stride("raw"), dtype=torch.uint8, device=device)
    rows.view(QUERY_DTYPES[geometry.dtype]).normal_()
    return rows


def coded_blocks(raw: torch.Tensor, geometry: SliceGeometry) -> torch.Tensor:
    """The same blocks under int8, uint8 [blocks, stride]."""
    coded = torch.empty(raw.shape[0], geometry.slice_stride("int8"), dtype=torch.uint8, device=raw.device)
    refused = triton_quant.quantise(row_addresses(raw, raw.device), row_addresses(coded, raw.device), geometry, 1)
    if int(refused.sum().item()):
        raise ValueError(f"{int(refused.sum().item())} random blocks were refused; the codec takes them all")
    return coded


def copy_rate(source: torch.Tensor, target: torch.Tensor, device: torch.device, repeats: int) -> float:
    """Bytes a second, read and written, of torch's copy."""
    return 2 * source.numel() / seconds(lambda: target.copy_(source, non_blocking=True), device, repeats)


def benchmarks(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Yield groups of figures, each a name and a function that measures it; the plain copy is measured before."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    limit = copy_rate(source, torch.empty_like(source), device, sizes.repeats)
    del source
    plain = Row("copy", f"torch, {sizes.copy_bytes >> 20} MiB in device memory, read + write", limit, "B/s", limit)
    yield "device copy", lambda: iter([plain])
    yield "decode", lambda: decode_rows(device, sizes, limit)
    yield "torch decode", lambda: torch_rows(device, sizes, limit)
    yield "prefill", lambda: prefill_rows(device, sizes)
    yield "codec", lambda: codec_rows(device, sizes, limit)
    yield "move", lambda: move_rows(device, sizes, limit)


def decode_rows(device: torch.device, sizes: Sizes, limit: float) -> Iterator[Row]:
    """One long sequence and a batch, Llama-8B's and SmolLM2-135M's heads, each dtype and int8."""
    shapes = ((8, 4, 128, "8B heads"), (3, 3, 64, "SmolLM2 heads"))
    for kv_heads, group, head_dim, name in shapes:
        for dtype in ("float16", "bfloat16"):
            geometry = SliceGeometry(kv_heads, head_dim, 64, dtype)
            raw = raw_blocks(sizes.long_tokens // 64, geometry, device)
            forms = [("raw", raw)] + ([("int8", coded_blocks(raw, geometry))] if dtype == "float16" else [])
            for codec, rows in forms:
                label = f"{'int8' if codec == 'int8' else dtype}, {name}"
                for sequences, tokens in ((1, sizes.long_tokens), (sizes.batch, sizes.batch_tokens)):
                    batch = make_batch(rows[: sequences * tokens // 64], geometry, codec, sequences, 1)
                    case = f"{sequences} x {batch.addresses.shape[1] * 64} tokens, {label}"
                    yield Row("decode", case, decode_rate(batch, group, device, sizes, None), "B/s", limit)
                if kv_heads == 8 and dtype == "float16":
                    yield from split_rows(make_batch(rows, geometry, codec, 1, 1), label, device, sizes, limit)


def split_rows(batch: PagedBatch, label: str, device: torch.device, sizes: Sizes, limit: float) -> Iterator[Row]:
    """One long sequence under several numbers of splits."""
    for splits in SPLITS if device.type == "cuda" else (2,):
        rate = decode_rate(batch, 4, device, sizes, splits)
        yield Row("decode", f"1 x {batch.addresses.shape[1] * 64} tokens, {label}, {splits} splits", rate, "B/s", limit)


def decode_rate(batch: PagedBatch, group: int, device: torch.device, sizes: Sizes, splits: int | None) -> float:
    """Bytes of K and V read a second by a decode step with one query a sequence."""
    geometry = batch.geometry
    shape = (batch.addresses.shape[0], geometry.kv_heads * group, geometry.head_dim)
    query = torch.randn(shape, device=device).to(QUERY_DTYPES[geometry.dtype])
    options = AttentionOptions(geometry.head_dim**-0.5)

    def run() -> object:
        return triton_attention.paged_attention(query, batch, options, layer=0, splits=splits)

    return batch.addresses.numel() * geometry.slice_bytes(batch.codec) / seconds(run, device, sizes.repeats)


def torch_rows(device: torch.device, sizes: Sizes, limit: float) -> Iterator[Row]:
    """The peer: torch's own attention over contiguous K and V, the group as query rows."""
    key = torch.randn(1, 8, sizes.long_tokens, 128, device=device).to(torch.float16)
    value, query = torch.randn_like(key), torch.randn(1, 8, 4, 128, device=device).to(torch.float16)

    def run() -> object:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    rate = 2 * key.numel() * key.element_size() / seconds(run, device, sizes.repeats)
    yield Row("decode", f"peer: torch attention, 1 x {sizes.long_tokens} tokens, contiguous fp16", rate, "B/s", limit)


def prefill_rows(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """A chunk over a past of four chunks; flops of the visible products, beside a large matrix product of torch."""
    chunk, past = sizes.prefill_tokens, 4 * sizes.prefill_tokens
    left = torch.randn(4 * chunk, 4 * chunk, device=device).to(torch.bfloat16)
    product = 2 * left.shape[0] ** 3 / seconds(lambda: left @ left, device, sizes.repeats)
    geometry = SliceGeometry(8, 128, 64, "bfloat16")
    raw = raw_blocks((past + chunk) // 64, geometry, device)
    visible = chunk * past + chunk * (chunk + 1) // 2
    for codec, rows in (("raw", raw), ("int8", coded_blocks(raw, geometry))):
        batch = make_batch(rows, geometry, codec, 1, chunk)
        query = torch.randn(chunk, 32, 128, device=device).to(torch.bfloat16)

        def run(batch: PagedBatch = batch, query: torch.Tensor = query) -> object:
            return triton_attention.paged_attention(query, batch, AttentionOptions(128**-0.5), layer=0)

        rate = 4 * visible * 32 * 128 / seconds(run, device, sizes.repeats)
        case = f"{chunk} tokens over {past}, {'bfloat16' if codec == 'raw' else 'int8'}, 8B heads"
        yield Row("prefill", case, rate, "flop/s", product, "bf16 matrix product")


def codec_rows(device: torch.device, sizes: Sizes, limit: float) -> Iterator[Row]:
    """Quantise and dequantise: bytes read and written a second."""
    geometry = SliceGeometry(8, 128, 64, "float16")
    raw = raw_blocks(sizes.long_tokens // 64, geometry, device)
    coded = coded_blocks(raw, geometry)
    moved = raw.shape[0] * (geometry.raw_bytes + geometry.int8_bytes)
    here, there = row_addresses(raw, device), row_addresses(coded, device)

    def encode() -> object:
        return triton_quant.quantise(here, there, geometry, 1)

    def decode() -> object:
        triton_quant.dequantise(there, here, geometry, 1)
        return here

    for name, run in (("quantise", encode), ("dequantise", decode)):
        rate = moved / seconds(run, device, sizes.repeats)
        yield Row(name, f"{sizes.long_tokens} tokens, float16, 8B heads", rate, "B/s", limit)


def move_rows(device: torch.device, sizes: Sizes, limit: float) -> Iterator[Row]:
    """Copies of blocks inside the device and from pinned host memory, and attention over host memory in place."""
    geometry = SliceGeometry(8, 128, 64, "float16")
    rows = raw_blocks(sizes.batch_tokens // 64, geometry, device)
    target = torch.empty_like(rows)
    host = rows.cpu().pin_memory() if device.type == "cuda" else rows.clone()
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(0)).to(device)
    into = row_addresses(target, device)
    bus = copy_rate(host, target, device, sizes.repeats) / 2
    yield Row("copy", "torch, pinned host memory to device", bus, "B/s", bus, "host copy")
    for name, source, ways, best, best_name in (
        ("shuffled blocks in device memory, read + write", rows, 2, limit, "device copy"),
        ("shuffled blocks from pinned host memory", host, 1, bus, "host copy"),
    ):
        places = row_addresses(source, device)[order]

        def run(places: torch.Tensor = places) -> object:
            triton_move.copy_blocks(places, into, rows.shape[1])
            return target

        rate = ways * rows.numel() / seconds(run, device, sizes.repeats)
        yield Row("copy", name, rate, "B/s", best, best_name)
    batch = make_batch(host, geometry, "raw", 1, 1)
    rate = decode_rate(batch, 4, device, sizes, None)
    case = f"1 x {sizes.batch_tokens} tokens in pinned host memory, float16, 8B heads"
    yield Row("decode", case, rate, "B/s", bus, "host copy")
