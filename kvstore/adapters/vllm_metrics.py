"""What the connector for vLLM counts, in vLLM's own log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTED: Final = {
    "loaded_blocks": "Blocks loaded from the store.",
    "load_failures": "Blocks that were found and could not be loaded; they were computed again.",
    "stored_blocks": "Blocks that the store has taken, or had already.",
    "store_failures": "Blocks that the store did not take.",
    "delayed_stores": "Steps after which blocks waited for room in the session's buffer.",
}


class TieredStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last time that they were taken."""

    def count(self, **more: int) -> None:
        """Add to what is named."""
        for name, number in more.items():
            if number:
                self.data[name] = self.data.get(name, 0) + number

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> TieredStats:
        """Together with another worker's, or an earlier interval's."""
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TieredMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as counters ``vllm:kvstore_...``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        make = metric_types[Counter]
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTED.items():
            counter = make(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*labels) for engine, labels in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, number in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)
