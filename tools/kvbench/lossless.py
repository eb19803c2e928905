"""``kvbench codec --text``: what the lossless coding of SSD and the wire saves on the K and V of a real model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.engine.text import TextCodec
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant import quantise
from kvstore.tiers.lossless import decode_slice, encode_slice
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.rows import Row
from kvstore.tools.kvbench.wire import WireBlocks, run_slow_wire, run_wire

BLOCK_TOKENS: Final = 64

Slices = NDArray[np.uint8]
"""Slices of one block a row."""


def run_lossless(model: Path, text: Path, daemon: DaemonProcess, *, tokens: int = 512, rounds: int = 15) -> list[Row]:
    """Ratio and speed for bf16, fp16 and int8 blocks of the first tokens of a text, computed in each dtype.

    Raw ones also go through ``daemon`` over TCP, whose HOST holds four times their bytes.
    """
    if not (model / "tokenizer.json").is_file():
        raise InvalidArgument("--model", str(model), "a folder with a model and its tokenizer.json")
    try:
        ids = TextCodec.load(model).encode(text.read_text(encoding="utf-8"))[:tokens]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("--text", str(text), f"a readable UTF-8 file ({error})") from error
    ids = ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS]
    if not ids:
        raise InvalidArgument("--text", str(text), f"{BLOCK_TOKENS} tokens at least")
    bf16, _ = slices_of(model, ids, "bfloat16")
    fp16, geometry = slices_of(model, ids, "float16")
    conditions = {"tokens": len(ids), "model": model.name, "text": text.name}
    rows = rows_of("bf16", bf16, 2, conditions) + rows_of("fp16", fp16, 2, conditions)
    rows += rows_of("int8", int8_of(fp16, geometry), 1, conditions)
    blocks = len(ids) // BLOCK_TOKENS
    for dtype, slices in (("bfloat16", bf16), ("float16", fp16)):
        kv = WireBlocks.of(slices, geometry, dtype, blocks)
        rows += run_wire(daemon, kv, rounds, conditions)
        if dtype == "bfloat16":
            rows += run_slow_wire(daemon, kv, max(1, rounds // 5), conditions)
    return rows


def slices_of(model: Path, ids: list[int], dtype: str) -> tuple[Slices, SliceGeometry]:
    """Raw slices of every layer and block of a text, [slices, bytes], as a model of that dtype makes them."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True).requires_grad_(False)
    device_ids = network.dummy_inputs["input_ids"].new_tensor([ids])
    cache = network(device_ids, use_cache=True).past_key_values
    found = []
    for layer in cache.layers:
        keys, values = _numbers(layer.keys[0], dtype), _numbers(layer.values[0], dtype)
        heads, count, width = keys.shape
        shape = (heads, count // BLOCK_TOKENS, BLOCK_TOKENS, width)
        # [blocks, heads, head_dim, tokens] and [blocks, heads, tokens, head_dim].
        keys, values = keys.reshape(shape).transpose(1, 0, 3, 2), values.reshape(shape).transpose(1, 0, 2, 3)
        both = [part.reshape(shape[1], heads, -1) for part in (keys, values)]
        found.append(np.concatenate(both, axis=2).reshape(shape[1], -1))
    slices = np.ascontiguousarray(np.concatenate(found))
    return slices.view(np.uint8), SliceGeometry(heads, width, BLOCK_TOKENS, dtype)


def _numbers(tensor: Any, dtype: str) -> NDArray[np.uint16]:
    """The bits of 16-bit numbers; numpy has no bf16, whose bits are the upper half of an fp32."""
    if dtype == "bfloat16":
        bits = tensor.float().numpy().view(np.uint32) >> 16
    else:
        bits = tensor.contiguous().numpy().view(np.uint16)
    return np.asarray(bits, dtype=np.uint16)


def int8_of(slices: Slices, geometry: SliceGeometry) -> Slices:
    """The same slices under the int8 codec."""
    stride = geometry.slice_stride("int8")
    coded = np.zeros(len(slices) * stride, np.uint8)
    if not quantise(slices, coded, geometry, len(slices), strides=(geometry.raw_bytes, stride)):
        raise InvalidArgument("--text", "values beyond fp16", "K and V that are finite; such blocks stay raw")
    return np.ascontiguousarray(coded.reshape(len(slices), stride)[:, : geometry.slice_bytes("int8")])


def rows_of(name: str, slices: Slices, planes: int, conditions: dict[str, Any]) -> list[Row]:
    """Ratio, and the speed of coding and decoding on one core."""
    views = [memoryview(one) for one in slices]
    coded: list[Any] = []
    encode_s = _seconds(lambda: coded.extend(encode_slice(view, planes) for view in views))
    kept = sum(map(len, coded))
    pairs = zip(coded, views, strict=True)
    packed = [(one, memoryview(bytearray(len(view)))) for one, view in pairs if one is not view]

    def decode() -> None:
        for one, into in packed:
            decode_slice(memoryview(one), planes, into)

    decode_s = _seconds(decode)
    conditions = conditions | {"slices": len(views), "coded slices": len(packed), "threads": 1}
    rows = [_row(f"lossless {name}, bytes saved", 100 * (1 - kept / slices.nbytes), "%", conditions)]
    rows.append(_row(f"lossless {name}, ratio", slices.nbytes / kept, "x", conditions))
    rows.append(_row(f"lossless {name}, code", slices.nbytes / encode_s / 1e6, "MB/s", conditions))
    if packed:
        nbytes = sum(len(into) for _, into in packed)
        rows.append(_row(f"lossless {name}, decode", nbytes / decode_s / 1e6, "MB/s", conditions))
    return rows


def _row(case: str, value: float, unit: str, conditions: dict[str, Any]) -> Row:
    return Row(bench="codec", case=case, value=value, unit=unit, conditions=conditions)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
