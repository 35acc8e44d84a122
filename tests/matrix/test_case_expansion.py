"""From a valid case file to its cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.verdict import OracleName
from loragate.matrix.case import Case, Dtype, Layout, Mix, Parallel, Ranks, Site, Tier
from loragate.matrix.ids import case_id
from loragate.matrix.load import load_cases

Load = Callable[[str], tuple[Case, ...]]

HEAD = """\
site: lora_linear
defaults: {dtype: bf16, rank: 8, slots: 4, tokens: 17, layout: padded_rows}
groups:
  one:
    tier: premerge
    oracles: [exact, canary]
    timeout_s: 12.5
    rows:
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def _load(text: str) -> tuple[Case, ...]:
        path = tmp_path / "cases.yaml"
        path.write_text(text)
        return load_cases([path])

    return _load


def test_a_row_takes_what_it_does_not_name_from_the_defaults_and_then_from_case(
    load: Load,
) -> None:
    row = "      - {in_features: 48, slices: [48, 16], tokens: 3, parallel: column, tp: 2}\n"
    assert load(HEAD + row) == (
        Case(
            site=Site.LORA_LINEAR,
            tokens=3,
            in_features=48,
            slices=(48, 16),
            rank=8,
            slots=4,
            dtype=Dtype.BF16,
            mix=Mix.RAGGED,
            ranks=Ranks.MIXED,
            layout=Layout.PADDED_ROWS,
            parallel=Parallel.COLUMN,
            tp=2,
            tier=Tier.PREMERGE,
            oracles=(OracleName.EXACT, OracleName.CANARY),
            timeout_s=12.5,
        ),
    )


def test_lists_of_a_row_multiply_and_rows_add_up(load: Load) -> None:
    cases = load(
        HEAD
        + "      - {in_features: [48, 50], slices: [[48, 16], [33], [7, 7]], rank: [1, 2]}\n"
        + "      - {in_features: 51, slices: [33]}\n"
    )
    points = {(case.in_features, case.slices, case.rank) for case in cases}
    assert len(cases) == len(points) == 2 * 3 * 2 + 1
    assert (50, (7, 7), 2) in points
    assert (51, (33,), 8) in points


def test_an_exclusion_takes_away_exactly_the_points_that_have_all_its_values(load: Load) -> None:
    cases = load(
        HEAD
        + "      - {in_features: [48, 50, 52], slices: [[48], [33]], rank: [1, 2]}\n"
        + "    exclude:\n"
        + "      - {in_features: [48, 52], slices: [33]}\n"
        + "      - {rank: 2, slices: [48]}\n"
    )
    points = {(case.in_features, case.slices, case.rank) for case in cases}
    assert points == {
        (48, (48,), 1),
        (50, (48,), 1),
        (52, (48,), 1),
        (50, (33,), 1),
        (50, (33,), 2),
    }


def test_an_exclusion_also_sees_defaults(load: Load) -> None:
    text = HEAD + "      - {in_features: [48, 50], slices: [33]}\n"
    cases = load(text + "    exclude:\n      - {in_features: 48, rank: 8, mix: ragged}\n")
    assert [case.in_features for case in cases] == [50]


def test_each_include_is_a_case(load: Load) -> None:
    cases = load(
        HEAD
        + "      - {in_features: 48, slices: [33]}\n"
        + "    include:\n"
        + "      - {in_features: 48, slices: [33], rank: 3}\n"
        + "      - {in_features: 50, slices: [33], rank: 4}\n"
    )
    assert sorted((case.in_features, case.rank) for case in cases) == [(48, 3), (48, 8), (50, 4)]


def test_an_include_is_added_whatever_is_excluded(load: Load) -> None:
    cases = load(
        HEAD
        + "      - {in_features: [48, 50], slices: [33]}\n"
        + "    exclude:\n      - {in_features: 48}\n"
        + "    include:\n      - {in_features: 48, slices: [33], rank: 3}\n"
    )
    assert [(case.in_features, case.rank) for case in cases] == [(48, 3), (50, 8)]


def test_a_cut_that_only_excluded_points_would_break_is_valid(load: Load) -> None:
    cases = load(
        HEAD
        + "      - in_features: 48\n        slices: [[48], [33]]\n"
        + "        parallel: [column, row]\n        tp: [1, 3, 4]\n"
        + "    exclude:\n      - {parallel: column, slices: [33], tp: 4}\n"
    )
    assert len(cases) == 11


def test_a_sampled_group_covers_every_allowed_pair_and_no_excluded_point(load: Load) -> None:
    cases = load(
        HEAD
        + "      - in_features: [32, 48, 64, 80]\n"
        + "        slices: [[48], [32, 16], [64, 8, 8]]\n"
        + "        rank: [1, 2, 3, 4, 5]\n"
        + "        dtype: [fp16, bf16, fp32]\n"
        + "    exclude:\n      - {dtype: fp32, rank: [4, 5]}\n"
        + "    sample: {limit: 30}\n"
    )
    assert 20 <= len(cases) <= 30
    assert {(c.rank, c.in_features) for c in cases} == {
        (rank, width) for rank in range(1, 6) for width in (32, 48, 64, 80)
    }
    assert {(c.rank, c.dtype) for c in cases} == {
        (rank, dtype) for rank in range(1, 6) for dtype in Dtype
    } - {(4, Dtype.FP32), (5, Dtype.FP32)}


def test_the_order_of_keys_and_files_changes_nothing(tmp_path: Path, load: Load) -> None:
    one = HEAD + "      - {in_features: [48, 50], slices: [33], rank: [1, 2]}\n"
    other = HEAD + "      - {rank: [1, 2], slices: [33], in_features: [48, 50]}\n"
    assert load(one) == load(other)
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(one)
    second.write_text(one.replace("[48, 50]", "[49, 51]"))
    cases = load_cases([first, second])
    assert cases == load_cases([second, first])
    assert [case_id(case) for case in cases] == sorted(case_id(case) for case in cases)
