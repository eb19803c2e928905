"""One run of the GPU's checks and benchmarks, and its tables as text and as markdown."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import triton

from kvstore.kernels.gpu_bench import Row, Sizes, benchmarks, sizes_for
from kvstore.kernels.gpu_cases import AttentionCase, Check, Checked, checks

__all__ = ["Report", "find_device", "full_cases", "measure", "small_cases"]

SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def find_device() -> torch.device | None:
    """The GPU that torch would use, or None."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


@dataclass
class Report:
    """What a run found. ``left_out`` says what the deadline did not allow."""

    card: str
    software: str
    checked: list[Checked] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed, and at least one ran."""
        return bool(self.checked) and all(check.passed for check in self.checked)

    def lines(self) -> list[tuple[str, str, str, str, str]]:
        """The table without its head: what, case, value, limit, fraction or verdict."""
        found = []
        for check in self.checked:
            verdict = "ok" if check.passed else f"FAILED {check.trouble}".strip()
            found.append(("check", check.name, f"{check.error:.1e}", f"{check.limit:.0e}", verdict))
        for row in self.rows:
            limit = f"{scaled(row.limit, row.unit)} ({row.limit_name})" if row.limit else ""
            fraction = f"{row.fraction:.2f}" if row.limit else ""
            found.append((row.bench, row.case, scaled(row.value, row.unit), limit, fraction))
        return found

    def table(self) -> str:
        """The table for a terminal."""
        head = ("what", "case", "value", "limit", "result")
        lines = [head, *self.lines()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([f"{self.card}; {self.software}", *text, self.summary()])

    def markdown(self) -> str:
        """The same as a section of docs/performance.md."""
        failed = [check for check in self.checked if not check.passed]
        lines = [f"## {self.card}", "", f"{self.software}. {self.summary()}", ""]
        lines += [f"- failed: {check.name}: {check.error:.1e} {check.trouble}" for check in failed]
        lines += ["| what | case | value | limit | fraction |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(line) + " |" for line in self.lines() if line[0] != "check"]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """One sentence with the count of checks, the time, and what was left out."""
        good = sum(check.passed for check in self.checked)
        text = f"{good} of {len(self.checked)} checks passed, {len(self.rows)} figures, {self.seconds:.0f} s."
        return f"{text} {self.left_out}".rstrip()


def scaled(value: float, unit: str) -> str:
    """A value with a decimal prefix: 3.35 TB/s."""
    for factor, prefix in SCALES:
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def full_cases() -> list[AttentionCase]:
    """Attention for a GPU: head sizes, dtypes, codecs, masks, places and splits; most of its time is compiling."""
    forms = [("float16", "raw"), ("bfloat16", "raw"), ("float32", "raw"), ("float16", "int8"), ("bfloat16", "int8")]
    found = []
    for dtype, codec in forms:
        form = AttentionCase(dtype=dtype, codec=codec)
        for head_dim in (32, 64, 80, 96, 112, 128, 256) if dtype == "float16" else (64, 128):
            found.append(replace(form, head_dim=head_dim, contexts=(1, 64, 500), queries=(1, 1, 1)))
        for head_dim in (64, 80, 128, 256) if dtype == "float16" else (64, 128):
            found.append(replace(form, head_dim=head_dim, contexts=(200, 33), queries=(70, 33)))
        found.append(replace(form, contexts=(300, 90), queries=(40, 1), window=100, soft_cap=5.0, sinks=True))
        found.append(replace(form, contexts=(300, 90), queries=(1, 1), pinned=True))
        found.append(replace(form, kv_heads=1, group=20, contexts=(300,)))
        found += [replace(form, splits=splits, contexts=(1500,)) for splits in (2, 7)]
    return found


def small_cases() -> list[AttentionCase]:
    """A few of them, small enough for the interpreter."""
    small = AttentionCase(kv_heads=1, group=2, head_dim=32)
    return [
        replace(small, contexts=(70, 5), queries=(1, 1), splits=2),
        replace(small, codec="int8", contexts=(130,), queries=(3,), window=60, sinks=True, pinned=True),
    ]


def measure(
    device: torch.device,
    *,
    deadline: float,
    benchmarks: bool = True,
    say: Callable[[str], None] = lambda text: None,
    cases: list[AttentionCase] | None = None,
    sizes: Sizes | None = None,
) -> Report:
    """Run the checks, then the benchmarks; nothing new starts after ``deadline`` (of ``time.monotonic``).

    A check that raises is a failed check, and the others still run. ``cases`` and ``sizes`` default to the full ones.
    """
    begin = time.monotonic()
    report = Report(
        _card(device), f"torch {torch.__version__}, triton {triton.__version__}, {platform.python_version()}"
    )
    for check in checks(full_cases() if cases is None else cases):
        if time.monotonic() > deadline:
            report.left_out = f"Out of time at check: {check.name}."
            break
        say(f"check {check.name}")
        report.checked.append(run_check(check, device))
    if benchmarks and not report.left_out:
        _measure_speed(report, device, deadline, say, sizes or sizes_for(device))
    report.seconds = time.monotonic() - begin
    return report


def run_check(check: Check, device: torch.device) -> Checked:
    """Run one check; whatever it raises is its result."""
    try:
        return Checked(check.name, check.run(device), check.limit)
    except Exception as error:  # noqa: BLE001  (a kernel that does not compile must not hide the other results)
        return Checked(check.name, float("nan"), check.limit, first_line(error))


def first_line(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _measure_speed(
    report: Report, device: torch.device, deadline: float, say: Callable[[str], None], sizes: Sizes
) -> None:
    for name, measure_group in benchmarks(device, sizes):
        try:
            for row in measure_group():
                report.rows.append(row)
                say(f"{row.bench} {row.case}: {scaled(row.value, row.unit)}")
                if time.monotonic() > deadline:
                    report.left_out = f"Out of time after: {row.bench}, {row.case}."
                    return
        except Exception as error:  # noqa: BLE001  (the other figures are wanted all the same)
            report.checked.append(Checked(f"figures of {name}", float("nan"), 0.0, first_line(error)))


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} (interpreter)"
