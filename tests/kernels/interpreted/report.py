"""The GPU check's own code, in the interpreter; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvstore.kernels import gpu_bench, gpu_cases, gpu_report
from kvstore.kernels.gpu_bench import Row, Sizes
from kvstore.kernels.gpu_cases import AttentionCase, Check, Checked, attention_error, checks
from kvstore.kernels.gpu_report import Report, Work, from_json, measure, small_cases, to_json
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.triton_launch import interpreted

CPU = torch.device("cpu")
TINY = Sizes(128, 1, 64, 16, 1 << 12, 1)


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_attention_checks_pass(case: AttentionCase) -> None:
    assert interpreted()
    assert attention_error(case, CPU) <= 1e-3


def test_attention_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forgets the second half of its splits is found out."""
    merge = gpu_cases.triton_attention.merge_stacked
    monkeypatch.setattr(
        gpu_cases.triton_attention, "merge_stacked", lambda out, lse: merge(out[:1].contiguous(), lse[:1].contiguous())
    )
    assert attention_error(small_cases()[0], CPU) > 1e-2


def test_codec_and_copy_checks_pass_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = SliceGeometry(1, 32, 64, "bfloat16")
    assert gpu_cases.codec_differences(geometry, CPU) == 0
    assert gpu_cases.copy_differences(CPU) == 0
    monkeypatch.setattr(gpu_cases.triton_quant, "dequantise", lambda *arguments: None)
    monkeypatch.setattr(gpu_cases.triton_move, "copy_blocks", lambda *arguments: None)
    assert gpu_cases.codec_differences(geometry, CPU) > 1000
    assert gpu_cases.copy_differences(CPU) > 1000


def test_every_part_has_a_check() -> None:
    names = [check.name for check in checks(small_cases())]
    assert len(names) == len(set(names))
    for word in ("decode", "prefill", "codec", "copy", "graph"):
        assert any(word in name for name in names)
    assert len({check.name for check in checks(gpu_report.full_cases())}) == len(list(checks(gpu_report.full_cases())))


def test_decode_is_measured() -> None:
    geometry = SliceGeometry(1, 32, 64, "float16")
    raw = gpu_bench.raw_blocks(2, geometry, CPU)
    batch = gpu_bench.make_batch(gpu_bench.coded_blocks(raw, geometry), geometry, "int8", 2, 1)
    assert batch.addresses.shape == (2, 1)
    assert gpu_bench.decode_rate(batch, 2, CPU, TINY, None) > 0


def groups(rows: list[Row], error: Exception | None) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    def failing() -> Iterator[Row]:
        yield rows[0]
        if error is not None:
            raise error

    yield "first", failing
    yield "second", lambda: iter(rows[1:])


ROWS = [Row("copy", "plain", 2e12, "B/s", 2e12), Row("decode", "long", 1.7e12, "B/s", 2e12)]


def run(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[torch.device], float], error: Exception | None) -> Report:
    monkeypatch.setattr(
        gpu_report, "checks", lambda cases: [Check("one", 0.5, outcome), Check("two", 0.5, lambda d: 0)]
    )
    monkeypatch.setattr(gpu_report, "benchmarks", lambda device, sizes: groups(ROWS, error))
    return measure(CPU, deadline=time.monotonic() + 1000)


def test_a_good_run(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(monkeypatch, lambda device: 0.5, None)
    assert report.passed
    assert report.rows == ROWS
    assert "2 of 2 checks passed, 2 figures" in report.table()
    assert "| decode | long | 1.7 TB/s | 2 TB/s (device copy) | 0.85 |" in report.markdown()
    assert report.markdown().startswith("## cpu (interpreter)\n")


def test_an_error_too_large_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run(monkeypatch, lambda device: 0.6, None).passed
    assert not run(monkeypatch, lambda device: float("nan"), None).passed


def test_what_raises_is_a_failure_and_the_rest_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(device: torch.device) -> float:
        raise RuntimeError("no kernel\nat all")

    report = run(monkeypatch, explode, ValueError("bad figure"))
    assert [check.trouble for check in report.checked] == ["RuntimeError: no kernel", "", "ValueError: bad figure"]
    assert report.rows == ROWS
    assert not report.passed
    assert "FAILED RuntimeError: no kernel" in report.table()
    assert "- failed: figures of first" in report.markdown()


def test_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "benchmarks", lambda device, sizes: groups(ROWS, None))
    report = measure(CPU, deadline=time.monotonic() - 1, work=Work(small_cases(), TINY))
    assert report.rows == ROWS[:1]
    assert not report.passed
    assert "Out of time at check: decode" in report.table()
    assert "checks were not run. Out of time after: copy, plain." in report.table()
    late = Report("card", "software", [Checked("x", 0.0, 0.0)])
    gpu_report._measure_speed(late, CPU, time.monotonic() - 1, lambda text: None, TINY)
    assert late.rows == ROWS[:1]
    assert late.left_out == "Out of time after: copy, plain."


def test_checks_leave_time_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu_report, "checks", lambda cases: [Check(str(i), 0.5, lambda d: 0) for i in range(100)])
    monkeypatch.setattr(gpu_report, "benchmarks", lambda device, sizes: groups(ROWS, None))
    report = measure(CPU, deadline=50, work=Work(sizes=TINY))
    assert 20 < len(report.checked) < 40
    assert report.rows == ROWS
    assert f"{100 - len(report.checked)} checks were not run" in report.left_out


def test_another_process_goes_on_where_the_device_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def outcome(name: str) -> Callable[[torch.device], float]:
        def check(device: torch.device) -> float:
            ran.append(name)
            if name == "two":
                raise RuntimeError("an illegal memory access was encountered")
            return 0.0

        return check

    monkeypatch.setattr(
        gpu_report, "checks", lambda cases: [Check(name, 0.5, outcome(name)) for name in ("one", "two", "three")]
    )
    monkeypatch.setattr(gpu_report, "benchmarks", lambda device, sizes: groups(ROWS, ValueError("wild")))
    monkeypatch.setattr(gpu_report, "answers", lambda device: False)
    deadline = time.monotonic() + 1000
    first = measure(CPU, deadline=deadline, work=Work(sizes=TINY))
    assert first.lost
    assert (ran, first.rows) == (["one", "two"], [])
    second = measure(CPU, deadline=deadline, work=Work(sizes=TINY), before=from_json(to_json(first)))
    assert second.lost
    assert (ran, second.rows) == (["one", "two", "three"], ROWS[:1])
    third = measure(CPU, deadline=deadline, work=Work(sizes=TINY), before=from_json(to_json(second)))
    assert not third.lost
    assert (ran[3:], third.rows) == ([], ROWS)
    assert [check.name for check in third.checked] == ["one", "two", "three", "figures of first"]
    assert third.seconds >= second.seconds >= first.seconds


def test_no_figures_without_the_copy_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(gpu_report, "checks", lambda cases: [Check("one", 0.5, lambda d: 0)])
    monkeypatch.setattr(gpu_report, "benchmarks", fail)
    report = measure(CPU, deadline=time.monotonic() + 1000, work=Work(sizes=TINY))
    assert [check.trouble for check in report.checked] == ["", "RuntimeError: no graphs here"]


def test_a_device_that_works_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    assert gpu_report.answers(CPU)
    monkeypatch.setattr(torch, "ones", lose)
    assert not gpu_report.answers(CPU)


@pytest.mark.slow
def test_a_whole_run() -> None:
    report = measure(CPU, deadline=time.monotonic() + 1000, work=Work(small_cases(), TINY))
    assert report.passed
    assert len(report.rows) > 20
    assert not report.left_out
