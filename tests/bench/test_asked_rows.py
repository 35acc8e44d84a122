"""Rows of `bench` that a user asks for in place of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragate.bench.asked import Asked, dense_asked, moe_asked
from loragate.bench.bars import Bar, worst_of
from loragate.bench.moe_rows import PROJECTIONS, projection_of
from loragate.bench.rows import LINEARS, linear_of
from loragate.cli import main
from loragate.commands.bench import judge_asked
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.matrix.case import Source


def bench(*arguments: str) -> ExitCode:
    return ExitCode(main(["bench", *arguments]))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("cpu", "", None, 1, 0)
    monkeypatch.setattr("loragate.core.machine.detect_machine", lambda: machine)


def test_a_layer_of_any_model_is_asked_for_by_its_sizes() -> None:
    asked = Asked(shapes=("8192x1024+128+128",), ranks=(128,), tokens=(512, 7))
    few, more = sorted(dense_asked(asked, (1,)), key=lambda row: row.tokens)
    assert (few.id, more.id) == ("8192x1024+128+128.m7.r128", "8192x1024+128+128.m512.r128")
    case = more.case
    assert (case.in_features, case.slices, case.rank) == (8192, (1024, 128, 128), 128)
    # bf16 of A and B of four slots, of x, and of the output that is read and written
    factors = 4 * 128 * (3 * 8192 + 1280)
    assert more.floor_bytes == 2 * (factors + 512 * 8192 + 2 * 512 * 1280)


def test_a_product_of_experts_is_asked_for_with_its_experts_and_their_choice() -> None:
    shapes = ("2048x768+768/128/8", "768x2048/128/8/pair")
    first, second = moe_asked(Asked(shapes=shapes, ranks=(8,)), (3,))
    assert first.id == "2048x768+768/128/8.m3.r8"
    assert (first.case.experts, first.case.top_k, first.case.source) == (128, 8, Source.TOKEN)
    assert (second.case.slices, second.case.x_rows) == ((2048,), 3 * 8)


def test_without_a_rank_it_is_16_and_without_tokens_they_are_those_of_the_table() -> None:
    rows = dense_asked(Asked(shapes=("64x32", "qkv", "64x32")), (1, 16))
    assert [(row.tokens, row.rank) for row in rows] == [(1, 16), (16, 16)] * 2
    assert rows[-1].linear == str(LINEARS["qkv"])


def test_what_is_written_of_a_layer_says_all_of_it() -> None:
    assert [linear_of(str(shape)) for shape in LINEARS.values()] == list(LINEARS.values())
    assert [projection_of(str(shape)) for shape in PROJECTIONS.values()] == [*PROJECTIONS.values()]


@pytest.mark.parametrize("rows_of", [dense_asked, moe_asked])
def test_a_seed_draws_as_many_different_points_as_are_asked_for(rows_of: object) -> None:
    assert callable(rows_of)
    drawn = rows_of(Asked(drawn=60, seed=7), (1,))
    assert len(set(drawn)) == 60
    assert rows_of(Asked(drawn=60, seed=7), (1,)) == drawn
    assert set(rows_of(Asked(drawn=60, seed=8), (1,))) != set(drawn)
    assert min(row.case.tokens for row in drawn) < 16 < 512 < max(row.case.tokens for row in drawn)
    assert {8, 128} <= {row.rank for row in drawn}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8192y1024"], "shape must be like 8192x1024+128+128"),
        (["--shape", "64x32+0"], "shape must be like 8192x1024+128+128"),
        (["--rank", "16"], "--rank and --tokens are those of layers; name one with --shape"),
        (["--shape", "64x32", "--rank", "0"], "--rank must be at least 1 (got 0)"),
        (["--shape", "64x32", "--tokens", "-3"], "--tokens must be at least 1 (got -3)"),
        (["--seed", "3"], "--seed is that of drawn points; say how many with --drawn"),
        (["--drawn", "-1"], "--drawn must be from 1 to 10000 (got -1)"),
        # not the rows of the table
        (["--drawn", "0"], "--drawn must be from 1 to 10000 (got 0)"),
        # more than there are
        (["--drawn", "1000000"], "--drawn must be from 1 to 10000 (got 1000000)"),
        (["--drawn", "3", "--shape", "64x32"], "leave out the others"),
        (["--drawn", "3", "--against", "main"], "--against takes rows of the table"),
        (["--shape", "64x32", "--record", "RECORD"], "--record takes rows of the table"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [str(tmp_path / "r.json") if text == "RECORD" else text for text in arguments]
    assert bench("dense", *given) is ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape", ["2048x768", "64x32/4/5", "64x32/4", "64x32/0/0", "64x32/4/2/row"]
)
def test_a_product_without_sound_experts_is_refused(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("moe", "--shape", shape) is ExitCode.USAGE
    assert f"(got '{shape}')" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_rows_that_make_sense_need_a_gpu_as_those_of_the_table() -> None:
    asked = ("dense", "--shape", "8192x1024+128+128", "--rank", "128", "--tokens", "512")
    assert bench(*asked) is ExitCode.INFRASTRUCTURE
    assert bench("moe", "--drawn", "60", "--seed", "7") is ExitCode.INFRASTRUCTURE


class Found:
    """Figures whose first bar is about the ratios, and whose second one about another size."""

    def __init__(self, ratios: tuple[float | None, ...], floor: float | None) -> None:
        self._ratios, self._floor = ratios, floor

    def ratios(self) -> tuple[float | None, ...]:
        return self._ratios

    def bars(self) -> tuple[Bar, ...]:
        return (Bar("ratio", 1.0, worst_of(self._ratios)), Bar("floor", 1.8, self._floor))


@pytest.mark.parametrize(
    ("ratios", "floor", "code"),
    [
        ((0.5, 0.7), None, ExitCode.OK),
        ((0.5, 1.5), None, ExitCode.WRONG),
        ((None, 0.7), 2.0, ExitCode.WRONG),
        # no baseline, or less than the noise, whatever other bars are met
        ((None, 0.7), 1.5, ExitCode.INCOMPLETE),
        ((None, None), None, ExitCode.INCOMPLETE),
    ],
)
def test_other_rows_need_their_ratios_and_no_missed_bar(
    ratios: tuple[float | None, ...], floor: float | None, code: ExitCode
) -> None:
    assert judge_asked(Found(ratios, floor)) is code
