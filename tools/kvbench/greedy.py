"""``kvbench greedy``: does an engine whose colder tiers are int8 choose the tokens that fp16 chooses?

The engine itself, over a daemon of its own. It answers prompts greedily with K and V in fp16; that is the teacher.
Then the prompts are stored through a namespace whose HOST and SSD are int8, with a DEVICE that holds but a part of
one step's prompts, and pushed down: half of them to HOST, half to SSD. At last the engine answers again, over those
blocks, and is fed the teacher's tokens: at each place its own choice is compared with the teacher's.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from transformers.utils.logging import disable_progress_bar

from kvstore.cache import Cache
from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InternalError, InvalidArgument
from kvstore.core.keys import chain_keys
from kvstore.core.types import BlockKey, Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.engine import Engine
from kvstore.engine.forcing import Choice, Watched
from kvstore.engine.reference import Reference
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import RequestId
from kvstore.engine.text import TextCodec
from kvstore.engine.weights import Model, load_model
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.greedy_report import Answered, report_of
from kvstore.tools.kvbench.quality import load_text, tokens_of
from kvstore.tools.kvbench.report import Report
from kvstore.tools.progress import Progress

PROSE: Final = "pydoc_data/topics.py"
"""The language reference as ``help`` shows it: 180,000 tokens of English."""
SOURCES: Final = (
    "glob.py", "queue.py", "shlex.py", "cmd.py", "textwrap.py", "heapq.py", "random.py", "statistics.py",
    "dataclasses.py", "argparse.py",
)  # fmt: skip
"""Modules of the standard library, the shortest first."""
TOKENS_MIN: Final = 320
TOKENS_STEP: Final = 32
"""Prompts have 320, 352, ... 928 tokens, so that most of what is attended to is in full blocks."""
SIZES: Final = {"device": "48 MiB", "host": "320 MiB", "ssd": "2 GiB", "ssd-free-floor": "64 MiB"}
"""DEVICE has 32 blocks of SmolLM2 in fp16, a fifth of what twenty prompts have."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure: the model's folder, the texts (none for the standard library's), how many and how long."""

    model: Path
    texts: tuple[Path, ...]
    prompts: int = 20
    answer: int = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A piece of a text. ``cold`` is where its blocks are pushed before it is asked about again."""

    text: str
    tokens: list[int]
    cold: Tier


@dataclass(slots=True)
class Bench:
    """The model and the prompts; ``int8`` is how the engine keeps K and V when it is compared with fp16."""

    model: Model
    prompts: list[Prompt]
    answer: int
    int8: EngineConfig

    def ask(
        self, cache: Cache | None, config: EngineConfig, watches: Sequence[Watched], answer: int
    ) -> tuple[list[dict[str, int]], Counters]:
        """Answer all prompts at once; returns where each prompt's tokens came from, and what the engine counted."""
        params = SamplingParams(tokens_max=answer, ignore_eos=True)
        engine = Engine(self.model, cache, config)
        cached: dict[RequestId, dict[str, int]] = {}
        try:
            ids = [
                engine.add_request(prompt.tokens, params, draw=watch)
                for prompt, watch in zip(self.prompts, watches, strict=True)
            ]
            while engine.has_work:
                for output in engine.step():
                    if output.token is None:
                        raise InternalError(f"a request ended without its tokens: {output.reason}")
                    cached.setdefault(output.request_id, output.cached_tokens)
        finally:
            engine.close()
        return [cached[i] for i in ids], engine.counters

    def store(self, daemon: DaemonProcess) -> Counters:
        """Compute the prompts into the cache, then push them down to where they are to be found."""
        with Client(daemon.socket, ClientOptions(name="greedy", strict=True)) as client:
            _, counters = self.ask(client, self.int8, [Watched() for _ in self.prompts], 1)
            # A block leaves HOST only once it is on SSD.
            client.flush()
        namespace = self.int8.spec_for(self.model.spec).namespace_id
        daemon.evict(Tier.DEVICE, namespace, self.keys(Tier.HOST, Tier.SSD))
        daemon.evict(Tier.HOST, namespace, self.keys(Tier.SSD))
        return counters

    def keys(self, *tiers: Tier) -> list[BlockKey]:
        """Keys of the full blocks of the prompts that go to these tiers."""
        spec = self.int8.spec_for(self.model.spec)
        chains = [chain_keys(spec.namespace_id, p.tokens, spec.block_tokens) for p in self.prompts if p.cold in tiers]
        return [key for chain in chains for key in chain]


def run_greedy(job: Job) -> Report:
    """Measure; see the head of this module."""
    prompts = cut(load_text(job.model), job.texts or default_texts(), job.prompts)
    disable_progress_bar()
    with Progress() as progress:
        with progress.step("loading the model"):
            model = load_model(job.model)
        fp16 = EngineConfig(name="greedy", kv_dtype="float16", running_max=job.prompts, private_bytes=4 << 30)
        bench = Bench(model, prompts, job.answer, replace(fp16, codec="int8"))
        with progress.step("the teacher: the engine with K and V in fp16"):
            teachers = [Watched() for _ in prompts]
            bench.ask(None, fp16, teachers, job.answer)
        tokens = [[choice.token for choice in teacher.choices] for teacher in teachers]
        forced = [Watched(one) for one in tokens]
        cached, stored, counters = _over_int8(bench, forced, progress)
        with progress.step("transformers alone, fed the same tokens"):
            reference = Reference(job.model)
            alone = [reference.choices(p.tokens, one) for p, one in zip(prompts, tokens, strict=True)]
    answered = [
        Answered(p.text, len(p.tokens), where, t.choices, _tokens(f.choices), other)
        for p, where, t, f, other in zip(prompts, cached, teachers, forced, alone, strict=True)
    ]
    return report_of(answered, stored, counters)


def _over_int8(
    bench: Bench, forced: Sequence[Watched], progress: Progress
) -> tuple[list[dict[str, int]], Counters, Counters]:
    """Where the prompts came from, and what the engines counted that stored them and that answered over them."""
    with TemporaryDirectory(prefix="kvbench-") as folder:
        flags = {**SIZES, "ssd-dir": str(Path(folder) / "ssd")}
        with DaemonProcess(Path(folder), flags) as daemon:
            with progress.step("starting kvstored"):
                daemon.start()
            with progress.step("storing the prompts, HOST and SSD in int8"):
                stored = bench.store(daemon)
            with (
                progress.step("the engine over int8, fed the teacher's tokens"),
                Client(daemon.socket, ClientOptions(name="greedy", strict=True)) as client,
            ):
                cached, counters = bench.ask(client, bench.int8, forced, bench.answer)
    return cached, stored, counters


def cut(codec: TextCodec, texts: Sequence[Path], count: int) -> list[Prompt]:
    """Prompts of growing length from the texts in turn, each the beginning of a part of its own."""
    chosen = [texts[index % len(texts)] for index in range(count)]
    encoded = {path: tokens_of(path, codec) for path in set(chosen)}
    prompts = []
    for index, path in enumerate(chosen):
        whole, length = encoded[path], TOKENS_MIN + index * TOKENS_STEP
        begin = chosen[:index].count(path) * (len(whole) // chosen.count(path))
        tokens = whole[begin : begin + length]
        if len(tokens) < length:
            raise InvalidArgument("TEXT", f"{path}: {len(whole)} tokens", f"{begin + length} tokens at least")
        # Every other one of each kind of text, where kinds take turns.
        prompts.append(Prompt(path.name, tokens, Tier.SSD if index // 2 % 2 else Tier.HOST))
    return prompts


def default_texts() -> list[Path]:
    """Prose and sources that come with Python, in turns: parts of its reference, and ten modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for name in SOURCES for path in (folder / PROSE, folder / name)]


def _tokens(choices: Sequence[Choice]) -> list[int]:
    return [choice.token for choice in choices]
