"""``python -m tests.engines.vllm_served`` is vLLM as ``vllm_process.py`` starts it: a line of JSON in, one out."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvstore.adapters.vllm import TieredConnector
from kvstore.client import EngineClient
from tests.engines.vllm_process import MARK


class _Served:
    def __init__(self, begun: dict[str, Any]) -> None:
        transfer = None
        if begun["extra"] is not None:
            transfer = KVTransferConfig(
                kv_connector="TieredConnector",
                kv_connector_module_path="kvstore.adapters.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=begun["extra"],
            )
        common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "skip_tokenizer_init": True}
        settings = {**common, "disable_log_stats": False, **begun["settings"]}
        self.llm = LLM(begun["model"], kv_transfer_config=transfer, **settings)

    def generate(
        self, prompts: list[list[int]], tokens: int = 24, trick: str = "", pid: int = 0, timed: bool = False
    ) -> dict[str, Any]:
        undo = (EngineClient.load, EngineClient.lookup)
        hooks = _Hooks() if timed else None
        if trick:
            _play(trick, pid)
        self.llm.reset_prefix_cache()
        before = self._hits()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        try:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        finally:
            EngineClient.load, EngineClient.lookup = undo  # type: ignore[method-assign]
            if hooks is not None:
                hooks.undo()
        return {
            "hooks": None if hooks is None else hooks.seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "first": [output.metrics.first_token_latency for output in outputs],
            "hits": self._hits() - before,
        }

    def _hits(self) -> int:
        named = [m for m in self.llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
        return int(sum(metric.value for metric in named))


class _Hooks:
    """Times of the calls that vLLM makes to the connector, by method, each [seconds...]."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._own = {n: f for n, f in vars(TieredConnector).items() if not n.startswith("_") and inspect.isfunction(f)}
        for name, method in self._own.items():
            setattr(TieredConnector, name, self._timed(name, method))

    def _timed(self, name: str, method: Any) -> Any:
        taken = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                taken.append(time.perf_counter() - began)

        return timed

    def undo(self) -> None:
        for name, method in self._own.items():
            setattr(TieredConnector, name, method)


def _play(trick: str, pid: int) -> None:
    """What happens to the next loads: zeros in place of what was loaded, or the daemon dies at that moment."""
    load, lookup = EngineClient.load, EngineClient.lookup

    def zeros(self: Any, namespace: Any, keys: Any, into: Any, deadline_s: Any = None) -> Any:
        transfer = load(self, namespace, keys, into, deadline_s)
        transfer.result()
        for address in into.addresses.ravel().tolist():
            ctypes.memset(address, 0, into.piece_bytes)
        return transfer

    def killed_after_lookup(self: Any, *arguments: Any, **named: Any) -> Any:
        found = lookup(self, *arguments, **named)
        os.kill(pid, signal.SIGKILL)
        return found

    def killed_while_loading(self: Any, *arguments: Any, **named: Any) -> Any:
        transfer = load(self, *arguments, **named)
        os.kill(pid, signal.SIGKILL)
        return transfer

    if trick == "zeros":
        EngineClient.load = zeros  # type: ignore[method-assign]
    elif trick == "killed after lookup":
        EngineClient.lookup = killed_after_lookup  # type: ignore[method-assign]
    elif trick == "killed while loading":
        EngineClient.load = killed_while_loading  # type: ignore[method-assign]
    else:
        raise ValueError(trick)


def main() -> None:
    """Serve until the standard input ends."""
    served: _Served | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if served is None:
            served = _Served(asked)
            answer: Any = True
        else:
            answer = served.generate(**asked)
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
