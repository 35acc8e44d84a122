from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.compile_leg.baseline import Record
from loragate.compile_leg.dry_launch import Compiled
from loragate.compile_leg.judge import judge, judge_all
from loragate.core.resources import Resources
from loragate.core.verdict import Verdict
from loragate.events.model import CompileResult

BEFORE = Resources(registers=64, spills=16, shared_bytes=4096)
KEY = ("sm_90", "toy_kernel", "small")
RECORD = Record("3.7.1", {KEY: BEFORE})


def _compiled(resources: Resources | None, error: str = "") -> Compiled:
    return Compiled("toy_kernel", "small", "sm_90", resources, error)


def _judge(resources: Resources | None, record: Record | None = RECORD) -> CompileResult:
    return judge(_compiled(resources, "boom"), record, subject="toy", triton="3.7.1")


def test_the_recorded_resources_pass_without_a_message() -> None:
    result = _judge(BEFORE)
    assert (result.verdict, result.message) == (Verdict.PASS, "")
    assert (result.resources, result.baseline) == (BEFORE, BEFORE)


def test_fewer_resources_than_recorded_pass() -> None:
    assert _judge(Resources(32, 0, 0)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": 72}, "registers 64 -> 72 (margin 8)"),
        ({"shared_bytes": 5120}, "shared bytes 4096 -> 5120 (margin 1024)"),
    ],
)
def test_growth_within_the_margin_passes_and_is_reported(
    change: dict[str, int], words: str
) -> None:
    result = _judge(replace(BEFORE, **change))
    assert result.verdict is Verdict.PASS
    assert result.message == f"resources grew within the margin: {words}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": 73}, "registers 64 -> 73 (margin 8)"),
        ({"spills": 17}, "spilled bytes 16 -> 17 (margin 0)"),
        ({"shared_bytes": 5121}, "shared bytes 4096 -> 5121 (margin 1024)"),
    ],
)
def test_growth_beyond_the_margin_fails(change: dict[str, int], words: str) -> None:
    result = _judge(replace(BEFORE, **change))
    assert result.verdict is Verdict.FAIL
    assert result.message == f"resources grew: {words}"


@pytest.mark.parametrize(
    "change",
    [{"registers": 73, "shared_bytes": 4097}, {"registers": 65, "spills": 17}],
    ids=["first", "second"],
)
def test_one_resource_beyond_its_margin_fails_beside_others_within_theirs(
    change: dict[str, int],
) -> None:
    assert _judge(replace(BEFORE, **change)).verdict is Verdict.FAIL


def test_a_kernel_that_does_not_compile_fails_even_without_a_baseline() -> None:
    result = _judge(None, record=None)
    assert (result.verdict, result.message) == (Verdict.FAIL, "does not compile: boom")


@pytest.mark.parametrize("record", [RECORD, None])
def test_a_kernel_that_reads_what_nothing_has_written_fails_whatever_its_resources(
    record: Record | None,
) -> None:
    item = replace(_compiled(BEFORE), unwritten="reads UR6, which nothing has written")
    result = judge(item, record, subject="toy", triton="3.7.1")
    assert result.verdict is Verdict.FAIL
    assert result.message == "was translated wrongly: reads UR6, which nothing has written"


@pytest.mark.parametrize("unchanged", [False, True])
def test_a_kernel_that_does_not_wait_for_those_around_it_fails_whatever_its_resources(
    unchanged: bool,
) -> None:
    item = replace(_compiled(BEFORE), unordered="reads too early", unchanged=unchanged)
    result = judge(item, RECORD, subject="toy", triton="3.7.1")
    assert result.verdict is Verdict.FAIL
    assert result.message == "is launched dependently: reads too early"


def test_a_kernel_that_does_not_compile_any_more_fails_although_it_is_on_record() -> None:
    result = _judge(None)
    assert (result.verdict, result.message) == (Verdict.FAIL, "does not compile: boom")
    assert result.resources is None


# what a block may ask for, by NVIDIA's tables of compute capabilities 8.0, 9.0 and 10.0
@pytest.mark.parametrize(("arch", "kibibytes"), [("sm_80", 163), ("sm_90", 227), ("sm_100", 227)])
def test_more_shared_memory_than_the_gpu_has_fails_even_if_recorded(
    arch: str, kibibytes: int
) -> None:
    limit = kibibytes * 1024
    for needed, verdict in ((limit, Verdict.PASS), (limit + 1, Verdict.FAIL)):
        resources = replace(BEFORE, shared_bytes=needed)
        record = Record("3.7.1", {(arch, *KEY[1:]): resources})
        item = replace(_compiled(resources), arch=arch)
        result = judge(item, record, subject="toy", triton="3.7.1")
        assert result.verdict is verdict
    said = f"needs {limit + 1} bytes of shared memory, {arch} allows a block at most {limit}"
    assert result.message == said


def test_a_kernel_without_a_record_leaves_the_gate_incomplete() -> None:
    result = _judge(BEFORE, record=Record("3.7.1", {}))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.message.startswith("no baseline for this kernel; record it with `python -m")


def test_an_unknown_release_of_triton_leaves_the_gate_incomplete() -> None:
    result = judge(_compiled(BEFORE), None, subject="toy", triton="3.12.0")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.message.startswith("no baseline for Triton 3.12; ")


def test_a_kernel_on_record_that_was_not_compiled_leaves_the_gate_incomplete() -> None:
    (result,) = judge_all([], RECORD, subject="toy", triton="3.7.1")
    assert (result.arch, result.kernel, result.specialisation) == KEY
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "is on record but was not compiled" in result.message
