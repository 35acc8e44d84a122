"""Bars, record and tables of `bench graphs`, from figures that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.bench.graphs_figures import (
    GraphFigures,
    GraphMeasured,
    HostFigures,
    MemoryFigures,
    ReplayFigures,
)
from loragate.bench.graphs_rows import HostRow, MemoryRow, ReplayRow, graph_rows
from loragate.bench.graphs_tables import render_markdown, render_terminal
from loragate.bench.select import select_rows
from loragate.core.verdict import Verdict


def measured(row: object) -> GraphMeasured:
    if isinstance(row, ReplayRow):
        return ReplayFigures(row, 102.0, 100.0)
    if isinstance(row, HostRow):
        return HostFigures(row, 100.0, 60.0)
    assert isinstance(row, MemoryRow)
    return MemoryFigures(row, 1 << 20, 1 << 20)


GOOD = GraphFigures("lorakernels", tuple(measured(row) for row in graph_rows()))


def with_one(changed: GraphMeasured) -> GraphFigures:
    found = [changed if one.row == changed.row else one for one in GOOD.measured]
    assert found != list(GOOD.measured)
    return replace(GOOD, measured=tuple(found))


def test_rows_cover_both_models_and_have_ids_of_their_own() -> None:
    rows = graph_rows()
    assert len({row.id for row in rows}) == len(rows)
    assert {row.model for row in rows} == {"qwen3_8b", "qwen3_30b_a3b"}
    assert len(select_rows(rows, ["host.*.s64"])) == 2


def test_rows_take_the_adapters_in_turns() -> None:
    assert ReplayRow("qwen3_8b", 4, 8).token_slots == (0, 1, 2, 3)
    assert ReplayRow("qwen3_8b", 5, 2).token_slots == (0, 1, 0, 1, 0)


def test_figures_within_all_bars_pass() -> None:
    assert GOOD.complete
    assert [bar.verdict for bar in GOOD.bars()] == [Verdict.PASS] * 4


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (ReplayFigures(ReplayRow("qwen3_8b", 64, 8), 106.0, 100.0), 0),
        (HostFigures(HostRow("qwen3_30b_a3b", 2), 121.0, 60.0), 1),
        (HostFigures(HostRow("qwen3_8b", 64), 105.0, 60.0), 2),
        (MemoryFigures(MemoryRow("qwen3_8b"), 1000, 1011), 3),
        (MemoryFigures(MemoryRow("qwen3_8b"), 1000, 989), 3),
    ],
)
def test_one_row_beyond_a_bar_misses_it(changed: GraphMeasured, missed: int) -> None:
    verdicts = [bar.verdict for bar in with_one(changed).bars()]
    assert verdicts[missed] is Verdict.FAIL
    assert verdicts.count(Verdict.FAIL) == 1


def test_a_bar_without_its_rows_is_inconclusive() -> None:
    few = [one for one in GOOD.measured if one.row.id != "host.qwen3_8b.s2"]
    figures = replace(GOOD, measured=tuple(few))
    assert not figures.complete
    assert figures.bars()[2].verdict is Verdict.INCONCLUSIVE
    nothing = replace(GOOD, measured=())
    assert {bar.verdict for bar in nothing.bars()} == {Verdict.INCONCLUSIVE}


def test_a_record_reads_as_the_figures_that_were_written() -> None:
    assert GraphFigures.from_payload(GOOD.payload()) == GOOD
    with pytest.raises(ValueError, match="schema is 99"):
        GraphFigures.from_payload(GOOD.payload() | {"schema": 99})


def test_tables_name_every_row_and_every_bar() -> None:
    text = render_terminal(GOOD)
    assert "qwen3_30b_a3b" in text
    assert "1.020" in text
    for bar in GOOD.bars():
        assert bar.name in text
    assert "| qwen3_8b | 64 | 100.0 | 60.0 | 40.0 |" in render_markdown(GOOD)
    # of an earlier record, which did not tell the launch apart: all of the step counts
    whole = HostFigures(HostRow("qwen3_8b", 64), 41.0)
    assert "| qwen3_8b | 64 | 41.0 | - | 41.0 |" in render_markdown(with_one(whole))
    only_memory = replace(GOOD, measured=(MemoryFigures(MemoryRow("qwen3_8b"), 2048, 1024),))
    assert render_markdown(only_memory).splitlines()[-1] == "| qwen3_8b | 2.0 | 1.0 |"
