"""One run of the GPU's checks and benchmarks, and its tables as text and as markdown."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
import triton

from kvstore.kernels.gpu_bench import Row, Sizes, benchmarks, sizes_for
from kvstore.kernels.gpu_cases import AttentionCase, Check, Checked, checks

__all__ = ["Report", "Work", "find_device", "from_json", "full_cases", "measure", "small_cases", "to_json"]

CHECKS_SHARE = 0.6
"""Of the time there is, after which no further check starts, so that figures are measured whatever compiling takes."""

SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def find_device() -> torch.device | None:
    """The GPU that torch would use, or None."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


@dataclass
class Report:
    """What a run found. ``left_out`` says what the deadline did not allow.

    ``lost`` is set when the device answers no more, as after an access outside memory: nothing else can run in this
    process then. ``groups`` are the groups of figures that have begun.
    """

    card: str
    software: str
    checked: list[Checked] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    left_out: str = ""
    seconds: float = 0.0
    lost: bool = False

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


@dataclass(frozen=True, slots=True)
class Work:
    """What to run: attention cases and sizes of benchmarks, the full ones where None, or no benchmarks at all."""

    cases: list[AttentionCase] | None = None
    sizes: Sizes | None = None
    benchmarks: bool = True


def measure(
    device: torch.device,
    *,
    deadline: float,
    work: Work = Work(),  # noqa: B008  (frozen)
    say: Callable[[str], None] = lambda text: None,
    before: Report | None = None,
) -> Report:
    """Run the checks, then the benchmarks; nothing new starts after ``deadline`` (of ``time.monotonic``).

    A check that raises is a failed check, and the others still run, unless the device is lost. ``before`` is what a
    process that lost the device had found: it is not run again.
    """
    begin = time.monotonic()
    software = f"torch {torch.__version__}, triton {triton.__version__}, {platform.python_version()}"
    report = before or Report(_card(device), software)
    report.lost, spent = False, report.seconds
    found = checks(full_cases() if work.cases is None else work.cases)
    _run_checks(report, device, begin + CHECKS_SHARE * (deadline - begin), say, list(found))
    if work.benchmarks and not report.lost:
        _measure_speed(report, device, deadline, say, work.sizes or sizes_for(device))
    report.seconds = spent + time.monotonic() - begin
    return report


def _run_checks(
    report: Report,
    device: torch.device,
    deadline: float,
    say: Callable[[str], None],
    found: list[Check],
) -> None:
    done = {check.name for check in report.checked}
    wanted = [check for check in found if check.name not in done]
    for index, check in enumerate(wanted):
        if time.monotonic() > deadline:
            report.left_out = f"Out of time at check: {check.name}; {len(wanted) - index} checks were not run."
            return
        say(f"check {check.name}")
        report.checked.append(run_check(check, device))
        if report.checked[-1].trouble and not answers(device):
            report.lost = True
            return


def answers(device: torch.device) -> bool:
    """Whether the device still works: a wild access, say, ends all that a process may do with it."""
    try:
        return int(torch.ones(1, dtype=torch.int32, device=device).sum().item()) == 1
    except RuntimeError:
        return False


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
    for name, measure_group in _groups(report, device, sizes):
        report.groups.append(name)
        try:
            for row in measure_group():
                report.rows.append(row)
                say(f"{row.bench} {row.case}: {scaled(row.value, row.unit)}")
                if time.monotonic() > deadline:
                    report.left_out = f"{report.left_out} Out of time after: {row.bench}, {row.case}.".strip()
                    return
        except Exception as error:  # noqa: BLE001  (the other figures are wanted all the same)
            _note(report, name, device, error)
            if report.lost:
                return


def _groups(report: Report, device: torch.device, sizes: Sizes) -> list[tuple[str, Callable[[], Iterator[Row]]]]:
    """The groups that have not begun; none when the copy that all are measured against can not be made."""
    try:
        return [group for group in benchmarks(device, sizes) if group[0] not in report.groups]
    except Exception as error:  # noqa: BLE001  (what the checks found is wanted all the same)
        _note(report, "the device copy", device, error)
        report.lost = False  # a fresh process would only lose it again
        return []


def _note(report: Report, name: str, device: torch.device, error: Exception) -> None:
    report.checked.append(Checked(f"figures of {name}", float("nan"), 0.0, first_line(error)))
    report.lost = not answers(device)


def to_json(report: Report) -> str:
    """A report as text, for the process that goes on after the device was lost."""
    return json.dumps(asdict(report))


def from_json(text: str) -> Report:
    """The report of ``to_json``."""
    found = json.loads(text)
    checked, rows = found.pop("checked"), found.pop("rows")
    return Report(**found, checked=[Checked(**check) for check in checked], rows=[Row(**row) for row in rows])


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} (interpreter)"
