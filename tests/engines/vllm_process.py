"""vLLM in a process of its own: started with settings, then told what to do, a line of JSON each.

``vllm_served.py`` is what runs in it; ``EngineProcess`` starts it and speaks to it. Greedy, float32,
on the CPU, without vLLM's own processes unless tensor parallelism needs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
MARK = "ANSWER "


class EngineProcess:
    """One engine. ``settings`` are arguments of ``LLM``; ``extra`` those of the connector, None for none."""

    def __init__(self, model: Path, log: Path, extra: dict[str, Any] | None, **settings: Any) -> None:
        self.log = log
        single = "1" if settings.get("tensor_parallel_size", 1) > 1 else "0"
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": single}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm_served"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment,
            )  # fmt: skip
        self._begun = {"model": str(model), "extra": extra, "settings": settings}
        self._ready = False
        self.said = ""
        """What it has logged, up to its last answer."""

    def ask(self, **what: Any) -> Any:
        """Tell it what to do and return its answer. RuntimeError with its log if it ends instead."""
        self.begin(**what)
        return self.answer()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self.said += line
        raise RuntimeError(
            f"vLLM ended with {self._process.wait()}:\n{self.said[-3000:]}{self.log.read_text()[-6000:]}"
        )

    def begin(self, **what: Any) -> None:
        """Tell it what to do; ``answer`` takes the answer."""
        if not self._ready:
            self._ready = True
            self.ask(**self._begun)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def generate(self, prompts: list[list[int]], **more: Any) -> Any:
        """Tokens of each prompt's answer, without what vLLM itself kept of earlier ones; ``hits`` are tokens loaded."""
        return self.ask(prompts=prompts, **more)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
