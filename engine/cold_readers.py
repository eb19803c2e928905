"""The readers of an engine's sequences: one a table, for as long as it is in use."""

from __future__ import annotations

from kvstore.core.namespace import BlockLayout
from kvstore.engine.blocks import BlockTable
from kvstore.engine.cold import ColdReader, Tally
from kvstore.engine.cold_fetch import FetchReader
from kvstore.engine.cold_plan import PlanReader
from kvstore.engine.link import CacheLink


class ColdReaders:
    """The readers of an engine's sequences."""

    def __init__(self, link: CacheLink, layout: BlockLayout, block_tokens: int) -> None:
        self._link = link
        self._layout = layout
        self._tokens = block_tokens
        self.tally = Tally()
        self._open: dict[int, tuple[BlockTable, ColdReader]] = {}

    def of(self, table: BlockTable) -> ColdReader:
        """The reader of a table with COLD blocks, which lives as long as the table is in use."""
        if id(table) not in self._open:
            fetch = FetchReader(self._link, self._layout, table, self._tokens, self.tally)
            self._open[id(table)] = table, PlanReader(self._link, self._layout, fetch)
        return self._open[id(table)][1]

    def close(self, table: BlockTable) -> None:
        """The table is not used any more."""
        found = self._open.pop(id(table), None)
        if found is not None:
            found[1].close()

    def forget(self) -> None:
        """The link was lost, and everything that readers had with it."""
        self._open.clear()
