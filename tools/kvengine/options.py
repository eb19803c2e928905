"""The command line of ``kvengine``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kvstore import __version__
from kvstore.core.errors import InvalidArgument
from kvstore.engine.params import SamplingParams, Selected
from kvstore.tools.output import Format

EPILOG = """\
Answers go to stdout, everything else to stderr.
Exit codes: 0 all prompts were answered, 1 at least one ran out of memory or lost its cache, 2 usage, 3 no daemon
answers on the socket, 4 the model can not be served, 130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine and its cache. ``socket`` None means an embedded store of these sizes; ``ssd`` None no SSD tier."""

    model: Path
    socket: str | None
    device_mib: int
    host_mib: int
    ssd: Path | None
    ssd_mib: int
    device: str
    dtype: str
    kv_dtype: str
    codec: str
    raw_layers: tuple[int, ...]
    raw_first_tokens: int
    recent_raw_tokens: int
    device_codec: str
    lossless: str
    salt: str
    token_budget: int
    running_max: int
    threads: int | None
    schedule: str
    host_share: float
    hot_mib: int
    cache_wait_s: float


@dataclass(frozen=True, slots=True)
class Options:
    """Prompts to run, and on what."""

    engine: EngineOptions
    prompts: tuple[str, ...]
    chat: bool
    sampling: SamplingParams
    output: Format


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; a wrong one ends the process with code 2 and says what would be right."""
    parser = argparse.ArgumentParser(
        prog="kvengine",
        usage="kvengine [options] MODEL -p PROMPT ...\n       kvengine serve [options] MODEL",
        description="Run prompts on a model, with K and V kept by kvstored or by a store inside this process; "
        "`kvengine serve` answers over HTTP as OpenAI's API does.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_prompts(parser.add_argument_group("prompts"))
    _add_sampling(parser.add_argument_group("answers"))
    parser.add_argument("--output", choices=[str(f) for f in Format], default=str(Format.TABLE))
    add_engine(parser)
    given = parser.parse_args(arguments)
    try:
        prompts = read_prompts(given.prompt, given.file, given.context)
        for option, words in (("--prompt", given.prompt), ("--stop", given.stop)):
            _check_text(option, words)
        sampling, engine = _sampling(given), engine_options(given)
    except (OSError, InvalidArgument) as error:
        parser.error(str(error))
    if not prompts:
        parser.error("no prompt: give --prompt TEXT or --file FILE with at least one line that is not empty")
    return Options(
        engine=engine,
        prompts=prompts,
        chat=given.chat,
        sampling=sampling,
        output=Format(given.output),
    )


def engine_options(given: argparse.Namespace) -> EngineOptions:
    """What ``add_engine`` and ``add_cache`` put into a command line. Raises InvalidArgument."""
    _check_text("--salt", [given.salt])
    return EngineOptions(**{field.name: getattr(given, field.name) for field in fields(EngineOptions)})


def read_prompts(texts: Sequence[str], file: Path | None, context: Path | None) -> tuple[str, ...]:
    """The prompts of the command line, then those of the file, one a line, each after the text of ``context``."""
    lines = _text_of("--file", file).splitlines() if file is not None else []
    before = _text_of("--context", context) if context is not None else ""
    return tuple(before + text for text in (*texts, *lines) if text.strip())


def _check_text(option: str, words: Sequence[str]) -> None:
    """Raise InvalidArgument for bytes that are no UTF-8, which a shell hands over as what no text has."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(option, ascii(word[:80]), "UTF-8") from error


def _text_of(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(option, repr(str(file)), f"a readable UTF-8 file ({error})") from error


def add_engine(parser: argparse.ArgumentParser) -> None:
    """What every command of ``kvengine`` takes: the model, the cache and the engine."""
    parser.add_argument("model", type=Path, help="a folder with config.json and safetensors files, or a GGUF file")
    parser.add_argument("--version", action="version", version=__version__)
    _add_cache(parser.add_argument_group("cache"))
    _add_engine(parser.add_argument_group("engine"))


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--prompt", action="append", default=[], help="a prompt; may be given several times")
    group.add_argument("-f", "--file", type=Path, help="a file with one prompt a line")
    group.add_argument("--context", type=Path, help="a file whose text stands before each prompt: a shared prefix")
    group.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-n", "--tokens-max", type=int, default=128, help="longest answer (default %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    group.add_argument("--seed", type=int, help="the same seed gives the same answer again")
    group.add_argument("--stop", action="append", default=[], help="end the answer before this text")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    group.add_argument(
        "--attention",
        choices=("exact", "selected"),
        default="exact",
        help="selected reads, of the blocks in storage, those that hold most of the attention (default %(default)s)",
    )
    group.add_argument(
        "--mass", type=float, default=Selected().mass, help="selected: share of it (default %(default)s)"
    )
    group.add_argument(
        "--max-share",
        type=float,
        default=Selected().max_share,
        help="selected: most blocks, as a share of the context's (default %(default)s)",
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--socket", help="the session socket of a daemon; without it the store is embedded")
    group.add_argument(
        "--device-mib", type=int, default=256, help="embedded: DEVICE tier, 0 for none (default %(default)s)"
    )
    group.add_argument("--host-mib", type=int, default=1024, help="embedded: HOST tier (default %(default)s)")
    group.add_argument("--ssd", type=Path, help="embedded: folder of the SSD tier, kept for the next run")
    group.add_argument("--ssd-mib", type=int, default=4096, help="embedded: cap of the SSD tier (default %(default)s)")
    group.add_argument("--codec", choices=("raw", "int8"), default="raw", help="of blocks below DEVICE")
    group.add_argument("--raw-layers", type=_layers, default=(), metavar="L,L", help="layers raw in int8 blocks")
    group.add_argument("--raw-first-tokens", type=int, default=0, metavar="N", help="tokens at the start that stay raw")
    group.add_argument(
        "--recent-raw-tokens",
        type=int,
        default=0,
        metavar="N",
        help="last tokens of a request that stay on DEVICE",
    )
    group.add_argument("--device-codec", choices=("raw", "int8"), default="raw", help="of full blocks on DEVICE")
    group.add_argument(
        "--lossless",
        choices=("lz4",),
        default="",
        help="code raw blocks on SSD and for remote clients without loss: pays for bfloat16",
    )
    group.add_argument("--salt", default="", help="keeps tenants apart")


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where it computes: auto follows the DEVICE tier, which else has to lie there; cuda is refused without "
        "a GPU (default %(default)s)",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="what the model computes in"
    )
    group.add_argument(
        "--kv-dtype",
        choices=("float32", "bfloat16", "float16"),
        default="",
        help="what raw K and V are kept in: float16 takes half of the memory of float32 (default: that of --dtype)",
    )
    group.add_argument("--token-budget", type=int, default=512, help="tokens of one step (default %(default)s)")
    group.add_argument("--running-max", type=int, default=16, help="requests at one time (default %(default)s)")
    group.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    group.add_argument(
        "--host-share",
        type=float,
        default=0.9,
        help="part of HOST for contexts that run; what they need beyond it is read from storage (default %(default)s)",
    )
    group.add_argument(
        "--hot-mib",
        type=int,
        default=512,
        help="memory for what selected attention read from storage lately (default %(default)s)",
    )
    group.add_argument(
        "--cache-wait-s",
        type=float,
        default=60.0,
        help="how long a context that only the cache can hold waits for a cache that was lost; then its request ends "
        "(default %(default)s)",
    )
    group.add_argument(
        "--schedule",
        choices=("priority", "fcfs", "shortest"),
        default="priority",
        help="which request goes first (default %(default)s, then who came first)",
    )


def _sampling(given: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        tokens_max=given.tokens_max,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        stop=tuple(given.stop),
        ignore_eos=given.ignore_eos,
        attention=Selected(mass=given.mass, max_share=given.max_share) if given.attention == "selected" else None,
    )
