"""What ``kvbench greedy`` says: the share of equal tokens, and each place where int8 chooses another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engine.counters import Counters
from kvstore.engine.forcing import Choice
from kvstore.tools.kvbench.report import Report, Table
from kvstore.tools.kvbench.rows import Row, median, number

TIERS: Final = ("host", "ssd")


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt: tokens of it by the tier they came from, and at each place of the answer who chooses what.

    ``teacher`` is the engine over fp16, whose tokens were fed to the others; ``int8`` the engine over int8, ``alone``
    transformers in fp32.
    """

    text: str
    prompt_tokens: int
    cached: dict[str, int]
    teacher: Sequence[Choice]
    int8: Sequence[int]
    alone: Sequence[int]

    @property
    def other(self) -> list[int]:
        """Places at which int8 chooses another token than the teacher."""
        return _other(self.teacher, self.int8)

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - sum(self.cached.values())


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over all prompts. Shares are of 1; ``margins`` and ``margins_other`` are the teacher's, in logits."""

    tokens: int
    same: float
    same_alone: float
    attended_int8: float
    margins: list[float]
    margins_other: list[float]


def total_of(answered: Sequence[Answered], counters: Counters) -> Total:
    """Add up."""
    tokens = sum(len(one.teacher) for one in answered)
    other = sum(len(one.other) for one in answered)
    other_alone = sum(len(_other(one.teacher, one.alone)) for one in answered)
    margins = [choice.margin for one in answered for choice in one.teacher]
    margins_other = [one.teacher[place].margin for one in answered for place in one.other]
    share = counters.tokens_attended_int8 / counters.tokens_attended
    return Total(tokens, 1 - other / tokens, 1 - other_alone / tokens, share, margins, margins_other)


def report_of(answered: Sequence[Answered], stored: Counters, counters: Counters) -> Report:
    """Rows and tables. ``stored`` was counted while the prompts were stored, ``counters`` while int8 answered."""
    total = total_of(answered, counters)
    common = {
        "prompts": len(answered),
        "tokens": total.tokens,
        "tokens of a prompt": f"{answered[0].prompt_tokens} to {answered[-1].prompt_tokens}",
        "compute": "fp32",
    }
    return Report(_rows(answered, total, common), [_summary(answered, total, stored, counters), _each(answered)])


def _rows(answered: Sequence[Answered], total: Total, common: dict[str, Any]) -> list[Row]:
    rows = [
        Row(
            bench="greedy",
            case="same token as fp16, int8 in HOST and on SSD",
            value=100 * total.same,
            unit="%",
            limit=100 * total.same_alone,
            limit_unit="%",
            limit_name="fp32 of transformers alone",
            conditions=common,
        ),
        Row(
            bench="greedy", case="attended tokens in int8", value=100 * total.attended_int8, unit="%", conditions=common
        ),
    ]
    for index, one in enumerate(answered):
        where = {"text": one.text, "prompt tokens": one.prompt_tokens, "from": one.cached, "places": one.other}
        rows.append(
            Row(
                bench="greedy",
                case=f"prompt {index + 1}, same token",
                value=100 * (1 - len(one.other) / len(one.teacher)),
                unit="%",
                conditions=common | where,
            )
        )
    return rows


def _summary(answered: Sequence[Answered], total: Total, stored: Counters, counters: Counters) -> Table:
    came = [(sum(one.cached.get(tier, 0) for one in answered), tier.upper()) for tier in TIERS]
    came.append((sum(one.computed for one in answered), "computed"))
    margins = f"{number(median(total.margins))} logits at the median of all places"
    if total.margins_other:
        differ, most = median(total.margins_other), max(total.margins_other)
        margins += f"; {number(differ)} where int8 differs, at most {number(most)}"
    moved = f"{stored.blocks_demoted:,} storing, {counters.blocks_demoted:,} answering"
    rows = [
        ("int8 chooses the token of fp16", f"{total.same:.2%} of {total.tokens:,}"),
        ("fp32 (transformers alone) chooses the token of fp16", f"{total.same_alone:.2%} of {total.tokens:,}"),
        ("attended tokens that lay in int8 blocks", f"{total.attended_int8:.1%} of {counters.tokens_attended:,}"),
        ("tokens of the prompts, by where they came from", ", ".join(f"{count:,} {name}" for count, name in came)),
        ("blocks that the engine moved from DEVICE to HOST meanwhile", moved),
        ("the first token less the second, in fp16", margins),
    ]
    return Table("Greedy tokens, the engine over int8 against fp16", "~What|~Figure", rows)


def _each(answered: Sequence[Answered]) -> Table:
    rows = []
    for one in answered:
        places = ", ".join(f"{place + 1} ({number(one.teacher[place].margin)})" for place in one.other)
        rows.append(
            (
                one.text,
                f"{one.prompt_tokens:,}",
                ", ".join(f"{one.cached[tier]:,} {tier.upper()}" for tier in one.cached),
                f"{len(one.teacher) - len(one.other)} of {len(one.teacher)}",
                f"{len(one.teacher) - len(_other(one.teacher, one.alone))} of {len(one.teacher)}",
                places or "-",
            )
        )
    titles = (
        "Prompt from|>Tokens|~Cached|>int8 as fp16|>fp32 as fp16|~int8 differs at token (first less second in fp16)"
    )
    return Table("Prompt by prompt", titles, rows)


def _other(teacher: Sequence[Choice], chosen: Sequence[int]) -> list[int]:
    return [place for place, (one, two) in enumerate(zip(teacher, chosen, strict=True)) if one.token != two]
