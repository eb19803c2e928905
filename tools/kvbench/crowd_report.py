"""What ``kvbench crowd`` says: rows for programs, one line for each number of clients for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.tools.kvbench.crowd import BATCH, BLOCK_BYTES, COPY_THREADS, Crowd
from kvstore.tools.kvbench.report import Report, Table
from kvstore.tools.kvbench.rows import Row, number, rate

SHARE_MIN: Final = 0.9
"""Of the most that as many clients or fewer reached: below it, one client costs the others."""
TITLES: Final = (
    ">Clients|>Calls/s|>Of the best so far|>MB/s|>Of memcpy|>Of the echoes|>Put p50, p99, ms|>Get p50, p99, ms|"
    ">Processor, daemon + clients, ms a call"
)


def lowest_share(totals: Sequence[float]) -> tuple[float, int]:
    """The least total over the most up to it, and its index."""
    shares = [total / max(totals[: i + 1]) for i, total in enumerate(totals)]
    least = min(shares)
    return least, shares.index(least)


def report(found: Sequence[Crowd]) -> Report:
    """Rows and the table, with a verdict below."""
    least, where = lowest_share([one.per_second for one in found])
    beside, beside_where = lowest_share([one.middle(lambda each: each.of_copies) for one in found])
    rows = [_row(one) for one in found]
    rows.append(
        Row(
            bench="crowd",
            case=f"least total of the best up to there, 1 to {found[-1].clients} clients",
            value=least,
            unit="times",
            limit=1.0,
            limit_unit="times",
            limit_name="no client costs another",
            target=f">= {SHARE_MIN}",
            conditions={"of memcpy beside each round": round(beside, 3)},
        )
    )
    kept = "never falls below" if least >= SHARE_MIN else "falls below"
    note = (
        f"The total {kept} {SHARE_MIN} of the best up to there: {least:.2f} at least, with {found[where].clients:,}. "
        f"As shares of memcpy beside each round: {beside:.2f} at least, with {found[beside_where].clients:,}."
    )
    title = f"Put and get of {BATCH} x {BLOCK_BYTES >> 10} KiB, by clients at a time"
    lines, best = [], 0.0
    for one in found:
        best = max(best, one.per_second)
        lines.append(_line(one, best))
    return Report(rows, [Table(title, TITLES, lines, note)])


def _row(one: Crowd) -> Row:
    waits = {
        f"{verb}_{name}_ms": round(one.milliseconds(verb, share), 3)
        for verb in ("puts", "gets")
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return Row(
        bench="crowd",
        case=f"{one.clients} client{'s' if one.clients > 1 else ''}: calls of {BATCH} x {BLOCK_BYTES >> 10} KiB",
        value=one.per_second,
        unit="calls/s",
        limit=one.middle(lambda each: each.copies),
        limit_unit="calls/s",
        limit_name=f"one memcpy of the same bytes, {COPY_THREADS} threads",
        conditions={
            "clients": one.clients,
            **waits,
            "echoes_per_s": round(one.middle(lambda each: each.echoes)),
            "daemon_ms_a_call": round(_daemon_ms(one), 4),
            "clients_ms_a_call": round(_clients_ms(one), 4),
            "misses": sum(each.misses for each in one.rounds),
            "rounds": [round(each.per_second) for each in one.rounds],
        },
    )


def _line(one: Crowd, best: float) -> tuple[str, ...]:
    def waits(verb: str) -> str:
        return ", ".join(number(one.milliseconds(verb, share)) for share in (0.5, 0.99))

    copies, echoes = one.middle(lambda each: each.copies), one.middle(lambda each: each.echoes)
    return (
        f"{one.clients:,}",
        number(one.per_second),
        f"{one.per_second / best:.2f}",
        number(rate(BATCH * BLOCK_BYTES, 1 / one.per_second)),
        f"{one.middle(lambda each: each.of_copies):.2f} of {number(copies)}/s",
        f"{one.middle(lambda each: each.per_second / each.echoes):.3f} of {number(echoes)}/s",
        waits("puts"),
        waits("gets"),
        f"{_daemon_ms(one):.2f} + {_clients_ms(one):.2f}",
    )


def _daemon_ms(one: Crowd) -> float:
    return one.middle(lambda each: each.daemon_s / each.calls) * 1e3


def _clients_ms(one: Crowd) -> float:
    return one.middle(lambda each: each.clients_s / each.calls) * 1e3
