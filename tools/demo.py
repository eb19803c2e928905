"""``make demo``: three questions over one long text: cold, warm from HOST, and warm from SSD after a restart.

The answers are compared with those of transformers alone; the exit code is 1 if a token differs, or if the blocks
did not come from where they should.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import RenderableType
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.keys import chain_keys
from kvstore.core.types import Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.reference import Reference
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.weights import Model, load_model
from kvstore.tools import text
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.fetch_model import fetch_model
from kvstore.tools.kvengine.answers import Answer, serve
from kvstore.tools.output import Format, Printer, columns
from kvstore.tools.progress import Progress
from kvstore.v1 import common_pb2

ROOT: Final = Path(__file__).resolve().parents[1]
SIZES: Final = {"device": "64 MiB", "host": "256 MiB", "ssd": "4 GiB"}
SOURCES: Final = ("timeit.py", "cmd.py", "shlex.py", "textwrap.py", "heapq.py")
"""Files of the standard library, the first that is long enough is asked about."""
TEXT_TOKENS_MIN: Final = 3000
ANSWER_TOKENS: Final = 24
QUESTIONS: Final = (
    "What is this module for? Answer in one sentence.",
    "Name the functions that this module defines.",
    "Which other modules does this file import?",
)
SHARE_MIN: Final = 0.9
"""Least share of a warm prompt that must come from the tier that its row names."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: when it was asked, what came, and how many blocks each tier held afterwards."""

    when: str
    source: str
    question: str
    answer: Answer
    blocks: dict[str, int]

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.answer.prompt_tokens - sum(self.answer.cached.values())

    @property
    def as_said(self) -> bool:
        """Whether the prompt came from where the row says: nearly all of it, or for a cold one nothing."""
        share = self.answer.cached.get(self.source, 0) / self.answer.prompt_tokens
        return share >= SHARE_MIN if self.source else not self.answer.cached


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo has at hand while it runs."""

    model: Model
    prompts: list[list[int]]
    daemon: DaemonProcess

    def ask(self, number: int, when: str, source: str) -> Asked:
        """Ask one question through a client and an engine of their own, so that nothing is kept but in the daemon."""
        params = SamplingParams(tokens_max=ANSWER_TOKENS)
        with Client(self.daemon.socket, ClientOptions(name="demo", strict=True)) as client:
            engine = Engine(self.model, client, EngineConfig(name="demo"))
            try:
                (answer,) = serve(engine, [self.prompts[number]], params)
            finally:
                engine.close()
            client.flush()
        return Asked(when, source, QUESTIONS[number], answer, self.blocks())

    def blocks(self) -> dict[str, int]:
        """Blocks by tier, as the daemon counts them."""
        return {common_pb2.Tier.Name(t.tier).removeprefix("TIER_"): t.blocks for t in self.daemon.status().tiers}

    def clear_device(self, number: int) -> None:
        """Demote the blocks of a prompt from DEVICE, so that the next question finds them in HOST."""
        spec = self.model.spec
        keys = chain_keys(spec.namespace_id, self.prompts[number], spec.block_tokens)
        self.daemon.evict(Tier.DEVICE, spec.namespace_id, keys)


def long_text(count: Callable[[str], int], folder: Path, names: Sequence[str] = SOURCES) -> tuple[str, str]:
    """Name and text of the first source file that is long enough. Unavailable if none is."""
    for name in names:
        path = folder / name
        if path.is_file() and count(content := path.read_text(encoding="utf-8")) >= TEXT_TOKENS_MIN:
            return name, content
    raise Unavailable(f"none of {', '.join(names)} in {folder} has {TEXT_TOKENS_MIN} tokens")


def run(progress: Progress) -> tuple[list[Asked], list[list[int]], Model]:
    """Do all of it; returns what was asked and the tokens of transformers alone."""
    with progress.step("getting SmolLM2-135M"):
        folder = fetch_model(ROOT, progress.report)
    with progress.step("loading the model into the engine"):
        model = load_model(folder)
    codec = model.text
    if codec is None:
        raise Unavailable(f"{folder} has no tokenizer")
    name, content = long_text(lambda piece: len(codec.encode(piece)), Path(sysconfig.get_path("stdlib")))
    prompts = [codec.chat([{"role": "user", "content": f"{content}\n\n{question}"}]) for question in QUESTIONS]
    progress.say(f"the text is {name}; prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens")
    data = ROOT / ".cache" / "demo"
    data.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="kvstore-demo-") as scratch, TemporaryDirectory(dir=data) as disk:
        flags = {**SIZES, "ssd-dir": disk, "ssd-free-floor": "256 MiB"}
        with DaemonProcess(Path(scratch), flags) as daemon:
            asked = _ask_all(Demo(model, prompts, daemon), progress)
    with progress.step("the same questions to transformers alone"):
        expected = Reference(folder).answers(prompts, ANSWER_TOKENS, tuple(model.eos_ids))
    return asked, expected, model


def _ask_all(demo: Demo, progress: Progress) -> list[Asked]:
    with progress.step("starting kvstored: DEVICE 64 MiB, HOST 256 MiB, SSD 4 GiB"):
        demo.daemon.start()
    with progress.step("warming up the processor"):
        engine = Engine(demo.model, None)
        serve(engine, [demo.prompts[0][:64]], SamplingParams(tokens_max=2))
        engine.close()
    with progress.step("first question, nothing is stored yet"):
        asked = [demo.ask(0, "cold", "")]
    demo.clear_device(0)
    with progress.step("second question, the text is in HOST"):
        asked.append(demo.ask(1, "warm from HOST", "host"))
    with progress.step("restarting kvstored"):
        demo.daemon.stop()
        seconds = demo.daemon.start()
    progress.say(f"ready again after {text.duration(seconds)}, with {demo.blocks()['SSD']} blocks on SSD")
    with progress.step("third question, the text is on SSD"):
        asked.append(demo.ask(2, "warm from SSD, after restart", "ssd"))
    return asked


def show(printer: Printer, asked: list[Asked], expected: list[list[int]], model: Model) -> bool:
    """Print the tables; True if every token is right and every row came from where it says."""
    right = [one.answer.tokens == tokens for one, tokens in zip(asked, expected, strict=True)]
    cold = asked[0].answer.first_s
    rows: list[list[RenderableType]] = []
    for one, same in zip(asked, right, strict=True):
        cached = one.answer.cached
        speed = f"{cold / one.answer.first_s:.1f}x" if one.source else ""
        came = (one.computed, cached.get("device", 0), cached.get("host", 0), cached.get("ssd", 0))
        verdict = Text("equal", style="green") if same else Text("DIFFERENT", style="bold red")
        rows.append([one.when, f"{one.answer.first_s:.2f} s", speed, *map(text.count, came), verdict])
    printer.line(Text("Time to the first token, and where the tokens of the prompt came from", style="bold"))
    printer.table(columns("~Question asked|>First token|>Faster|>Computed|>DEVICE|>HOST|>SSD|Transformers"), rows)
    printer.line()
    printer.line(Text("Blocks held afterwards, by tier", style="bold"))
    tiers = list(asked[0].blocks)
    held = [[one.when, *(text.count(one.blocks[tier]) for tier in tiers)] for one in asked]
    printer.table(columns("~Question asked|" + "|".join(f">{tier}" for tier in tiers)), held)
    printer.line()
    for one in asked:
        said = model.text.decode(one.answer.tokens) if model.text else ""
        printer.line(Text(f"Q: {one.question}", "dim"))
        printer.line(f"A: {' '.join(said.split())} ...")
    printer.line()
    for one in asked:
        if not one.as_said:
            printer.line(Text(f"{one.when}: the prompt came from {one.answer.cached or 'nowhere'}", style="bold red"))
    if all(right):
        printer.line(Text("All tokens equal those of transformers alone.", style="green"))
    else:
        printer.line(Text("Some tokens differ from those of transformers alone.", style="bold red"))
    return all(right) and all(one.as_said for one in asked)


def main() -> int:
    """Entry point; the exit code is 0 only if everything came out as it should."""
    begin = time.monotonic()
    printer = Printer(Format.TABLE)
    disable_progress_bar()
    try:
        with Progress() as progress:
            asked, expected, model = run(progress)
    except KVStoreError as error:
        printer.talk(f"demo: {error.message}", style="red")
        return 1
    printer.line()
    good = show(printer, asked, expected, model)
    printer.talk(f"took {text.duration(time.monotonic() - begin)}", style="dim")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
