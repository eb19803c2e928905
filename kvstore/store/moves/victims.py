"""The victims of one call, chosen one by one: what may go, in what order, and when it is enough. Lock held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.types import Tier
from kvstore.kernels.layout import align_up
from kvstore.store.columns.index import NONE
from kvstore.store.guarantees import Share
from kvstore.store.tables.book import Book, copy_number
from kvstore.tiers.base import Arena

if TYPE_CHECKING:
    from kvstore.store.moves.space import Space

GUARDED_MAX: Final = 256
"""Guaranteed copies that one choice passes by, which the policy sets aside: then others have their turn with the lock.
Also those that it looks at where a chain may break; then the young leaves of others go."""


class Verdict(Enum):
    """What may become of a copy at the cold end."""

    DROP = "drop"
    DEMOTE = "demote"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Victim:
    """A copy to be dropped; with ``demote`` after it was copied to a colder tier."""

    slot: int
    demote: bool
    nbytes: int


class Victims:
    """Meets ``eviction.Choice``. ``well`` says whether what was chosen is an answer: enough of it, or ``limit``."""

    def __init__(  # noqa: PLR0913  what makes one choice
        self,
        space: Space,
        book: Book,
        tier: Tier,
        nbytes: int,
        limit: int,
        *,
        demote: bool,
        holes: Holes | None = None,
    ) -> None:
        self._space = space
        self._book = book
        self._state = space.state
        self._tier = tier
        self._wanted = nbytes
        self._limit = limit
        self._demote = demote
        self._holes = holes
        self.freed = 0
        self._going: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._taken: dict[Share, int] = {}
        self._guarded = self._passed = 0
        self.victims: list[Victim] = []
        self.uncovered = NONE
        self.refused = False

    @property
    def well(self) -> bool:
        """Whether the victims are enough, or as many as were allowed."""
        enough = self.freed >= self._wanted if self._holes is None else self._holes.largest >= self._wanted
        return bool(self.victims) and (enough or len(self.victims) >= self._limit)

    @property
    def done(self) -> bool:
        """See ``eviction.Choice``."""
        return self.refused or self.well or self.tired

    @property
    def tired(self) -> bool:
        """Whether it ended for what it passed by and not for want of copies: the next choice goes on behind them."""
        return self._passed >= GUARDED_MAX

    def take(self, slot: int) -> bool:
        """See ``eviction.Choice``. Children go before their parents."""
        book = self._book
        tier = self._tier
        if book.index.kids[tier][slot] > self._going.get(slot, 0) and not self._space.may_go_alone(book, slot, tier):
            return False
        self._space.vanishing = self._gone
        guarded, taken = self._guarded, self._judged(slot)
        self._passed += self._guarded - guarded
        return taken

    @property
    def may_break(self) -> bool:
        """See ``eviction.Choice``."""
        return self._tier in self._state.storages

    def take_anyway(self, slots: Iterable[int]) -> None:
        """See ``eviction.Choice``: a chain that is longer than the tier loses its oldest blocks, not its newest."""
        if not self.may_break:
            return
        book = self._book
        taken = {victim.slot for victim in self.victims}
        for slot in slots:
            if self.done or self._guarded - self._passed >= GUARDED_MAX:
                return
            if slot not in taken and slot not in book.holds:
                # Its children stay, under a ghost of it.
                self._space.vanishing = {slot: book.index.children[slot]}
                self._judged(slot)

    def _judged(self, slot: int) -> bool:
        book = self._book
        tier = self._tier
        index = book.index
        share, nbytes = book.namespace(slot).share, book.nbytes(slot, tier)
        if share is not None and share.keeps(tier, nbytes + self._taken.get(share, 0)):
            self._guarded += 1
            share.refused(slot, tier)
            return False
        verdict = Verdict.KEEP if copy_number(slot, tier) in book.pins else self._space.judge(book, slot, tier)
        if verdict is Verdict.KEEP:
            return False
        if verdict is Verdict.DEMOTE and not self._demote:
            self.refused = True
            return False
        size = align_up(nbytes, PAGE_BYTES)
        if share is not None:
            self._taken[share] = self._taken.get(share, 0) + nbytes
        self.victims.append(Victim(slot, verdict is Verdict.DEMOTE, size))
        self.freed += size
        if self._holes is not None:
            self._holes.add(index.offset(slot, tier), size)
        parent, self.uncovered = index.parent[slot], NONE
        if parent >= 0:
            self._going[parent] = self._going.get(parent, 0) + 1
            if index.residency[slot] == tier.bit:
                self._gone[parent] = self._gone.get(parent, 0) + 1
            if index.kids[tier][parent] == self._going[parent]:
                self.uncovered = parent
        return True


class Holes:
    """The holes that freed ranges make of an arena, joined one by one."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self.largest = 0

    def add(self, offset: int, nbytes: int) -> None:
        """Count a range as free."""
        before, after = self._arena.holes_beside(offset, offset + nbytes)
        begin, end = offset - before, offset + nbytes + after
        begin = self._ends.pop(begin, begin)
        end = self._starts.pop(end, end)
        self._starts.pop(begin, None)
        self._ends.pop(end, None)
        self._starts[begin], self._ends[end] = end, begin
        self.largest = max(self.largest, end - begin)
