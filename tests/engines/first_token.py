"""``python -m tests.engines.first_token`` in vLLM's environment: time to first token, with the store and without.

Prompts of 1,000 random tokens, greedy, fp32, on the CPU, one at a time. *Cold* is measured in turns with a vLLM without
a connector; *HOST* is the same prompts again (vLLM's own prefix cache is emptied before each), *SSD* once more after a
restart of the daemon. Medians; answers must be equal in all four.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.tools.daemon_process import DaemonProcess
from tests.engines.conftest import ROOT
from tests.engines.vllm_process import EngineProcess

TOKENS = 1_000
BLOCK = 64
STEPS = 128


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(100, 40_000) for _ in range(TOKENS)] for _ in range(count)]


def main() -> None:
    """Run it and print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", default="2", help="threads of each vLLM")
    asked = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = asked.threads
    kvstored = (str(ROOT / ".venv" / "bin" / "python"), "-m", "kvstore.daemon.main")
    with TemporaryDirectory(prefix="kvv-") as folder:
        place = Path(folder)
        flags = {"device": "0", "host": "1 GiB", "ssd": "2 GiB", "ssd-dir": f"{folder}/ssd", "ssd-free-floor": "0"}
        with DaemonProcess(place, flags, kvstored) as daemon:
            daemon.start()
            alone = EngineProcess(asked.model, place / "alone.log", None, block_size=BLOCK)
            extra = {"socket": str(daemon.socket), "deadline_s": 10.0}
            stored = EngineProcess(asked.model, place / "stored.log", extra, block_size=BLOCK)
            for engine in (alone, stored):
                engine.generate(prompts(1, 1), tokens=2)
            wanted = prompts(asked.rounds, 2)
            first: dict[str, list[float]] = {"alone": [], "cold": [], "HOST": [], "SSD": []}
            answers: dict[str, list[list[int]]] = {name: [] for name in first}

            def run(name: str, engine: EngineProcess, prompt: list[int]) -> int:
                got = engine.generate([prompt], tokens=4)
                first[name] += got["first"]
                answers[name] += got["tokens"]
                return int(got["hits"])

            for prompt in wanted:
                run("alone", alone, prompt)
                hits = run("cold", stored, prompt)
                if hits:
                    raise SystemExit("a cold prompt was found in the store")
            loaded = [run("HOST", stored, prompt) for prompt in wanted]
            daemon.stop()
            daemon.start()
            # The first call after a restart finds out that there was one.
            stored.generate(prompts(1, 3), tokens=2)
            loaded += [run("SSD", stored, prompt) for prompt in wanted]
            cold = stored.generate(prompts(1, 4), tokens=2, timed=True)["hooks"]
            short, long = (stored.generate([wanted[0]], tokens=n, timed=True)["hooks"] for n in (2, 2 + STEPS))
            for engine in (alone, stored):
                engine.close()
    if any(answers[name] != answers["alone"] for name in answers):
        raise SystemExit(f"answers differ: {answers}")
    if min(loaded) < TOKENS // BLOCK * BLOCK - BLOCK:
        raise SystemExit(f"not all was loaded: {loaded} tokens")
    middle = {name: statistics.median(times) for name, times in first.items()}
    print(f"medians of {asked.rounds}, {TOKENS} tokens; load {os.getloadavg()[0]:.1f} at the end; answers are equal")
    for name, target in (("alone", ""), ("cold", "<= 1.03 of alone"), ("HOST", "cold / 7"), ("SSD", "cold / 4")):
        ratio = middle[name] / middle["alone"] if name == "cold" else middle["cold"] / middle[name]
        said = f"{ratio:.3f} of alone" if name == "cold" else f"{ratio:.2f} times faster than cold"
        print(f"{name:6} {middle[name] * 1000:8.1f} ms  {'' if name == 'alone' else said:32} {target}")
    step = sum(sum(long[name]) - sum(short[name]) for name in long) / STEPS
    print(f"hooks of a decode step: {step * 1e6:.0f} us on average over {STEPS} steps, two blocks saved (<= 50 us)")
    longest = max((max(taken), name) for name, taken in cold.items() if taken)
    print(f"longest hook while {TOKENS} tokens are saved: {longest[0] * 1e3:.1f} ms, {longest[1]} (<= 10 ms)")


if __name__ == "__main__":
    main()
