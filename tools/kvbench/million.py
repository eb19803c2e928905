"""``kvbench million``: decode steps of a real model over a long context in storage, beside what disk and compute allow.

K and V are those of a real prompt, tiled to the length that is asked for: the model's answer means nothing, but every
byte that a step reads and every product that it makes are those of a context of that length. They are put through a
client, which encodes them, and nothing of them is in memory when the steps begin.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Durability, Outcome
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.params import SamplingParams, Selected
from kvstore.engine.tiling import PROMPT_BLOCKS, compute_seconds, prefilled
from kvstore.engine.weights import load_model
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.limits import disk_bandwidth
from kvstore.tools.kvbench.processes import processor_seconds
from kvstore.tools.kvbench.rows import Row, median

PUT_BLOCKS: Final = 32
BUFFER_BYTES: Final = 128 << 20
HOT_BYTES: Final = 4 << 30
"""Of which a request takes half: what 5 % of a million tokens take, three times."""


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
    config = EngineConfig(name="million", kv_dtype="float16", host_share=0.0, running_max=1, hot_bytes=HOT_BYTES)
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
