"""``kvengine``: the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar

from kvstore.cache import Cache
from kvstore.client import Client, ClientOptions
from kvstore.core.decoders import UnsupportedModel
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.link import cuda_device
from kvstore.engine.sequence import FinishReason
from kvstore.engine.weights import Model, load_model, use_threads
from kvstore.tools.kvengine.embedded import embedded_cache
from kvstore.tools.kvengine.options import Options, parse
from kvstore.tools.kvengine.report import print_answers
from kvstore.tools.kvengine.serve import Answer, serve
from kvstore.tools.output import Printer

OK, STARVED, USAGE, UNREACHABLE, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of ``kvengine``; ends the process with the documented exit code."""
    sys.exit(run(parse(arguments)))


def run(options: Options) -> int:
    """Load, serve, print; returns the exit code."""
    printer = Printer(options.output)
    try:
        return _run(options, printer)
    except UnsupportedModel as error:
        printer.talk(f"error: {error}", style="red")
        return UNSUPPORTED
    except InvalidArgument as error:
        printer.talk(f"error: {error}", style="red")
        return USAGE
    except OSError as error:
        where = "" if error.filename is None else f"{str(error.filename)[:200]!r}: "
        printer.talk(f"error: {where}{error.strerror or error}", style="red")
        return USAGE
    except KeyboardInterrupt:
        printer.talk("kvengine: interrupted")
        return INTERRUPTED
    except Unavailable as error:
        printer.talk(f"error: {error}", style="red")
        return UNREACHABLE
    except KVStoreError as error:
        printer.talk(f"error: {error}", style="red")
        return STARVED


def _run(options: Options, printer: Printer) -> int:
    if options.device == "cuda":
        # Before the model is loaded, which takes long.
        cuda_device("--device")
    if options.threads is not None:
        use_threads(options.threads)
    with _cache(options) as cache:
        printer.talk(f"loading {options.model}")
        disable_progress_bar()
        model = load_model(options.model, dtype=options.dtype, codec=options.codec, salt=options.salt.encode())
        config = EngineConfig(
            device=options.device,
            kv_dtype=options.kv_dtype or None,
            token_budget=options.token_budget,
            running_max=options.running_max,
            raw_layers=options.raw_layers,
            raw_first_tokens=options.raw_first_tokens,
            recent_raw_tokens=options.recent_raw_tokens,
            policy=NamespacePolicy(lossless=options.lossless) if options.lossless else None,
            device_codec=None if options.device_codec == "raw" else options.device_codec,
            name="kvengine",
        )
        engine = Engine(model, cache, config)
        try:
            shown = _stream if printer.for_people else None
            answers = serve(engine, _prompts(model, options), options.sampling, shown)
            print_answers(printer, answers, engine.counters)
        finally:
            engine.close()
    return STARVED if any(_starved(answer) for answer in answers) else OK


@contextmanager
def _cache(options: Options) -> Iterator[Cache]:
    if options.socket is None:
        with embedded_cache(options.device_mib, options.host_mib, options.ssd, options.ssd_mib) as cache:
            yield cache
        return
    # Strict, since the engine itself turns failures of the cache into recomputation, and must see them for that.
    with Client(options.socket, ClientOptions(name="kvengine", strict=True)) as client:
        yield client


def _prompts(model: Model, options: Options) -> list[list[int]]:
    if model.text is None:
        raise InvalidArgument("model", str(options.model), "a folder with tokenizer.json, to run text")
    if options.chat:
        return [model.text.chat([{"role": "user", "content": prompt}]) for prompt in options.prompts]
    return [model.text.encode(prompt) for prompt in options.prompts]


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _starved(answer: Answer) -> bool:
    return answer.reason is FinishReason.MEMORY


if __name__ == "__main__":
    main()
