from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loragate.bench import dense
from loragate.bench.contender import Contender, find_contender
from loragate.bench.graphs_rows import graph_rows
from loragate.bench.kinds import KINDS
from loragate.bench.rows import LINEARS, DenseRow, Linear, dense_rows
from loragate.bench.speed.comparing import Request
from loragate.bench.speed.figures import KernelPair, ResourcePairs, SpeedFigures, pairs_of
from loragate.bench.speed.orders import Begin, Channel, Order, begin_line, order_line
from loragate.bench.speed.statistics import Change, Comparison
from loragate.bench.speed.tables import render_terminal
from loragate.bench.speed.worker import _check_package, _rows, serve
from loragate.bench.timer import Clock
from loragate.cli import main
from loragate.core.checkout import project_root
from loragate.core.machine import Machine, detect_machine
from loragate.core.resources import Resources
from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.events.model import Note
from loragate.faults.planting import package_folder
from loragate.records.results import require_section

# a build to compare with, wherever the tests run
_CHECKOUT = str(project_root())


@dataclass(frozen=True)
class Row:
    id: str


@dataclass(frozen=True)
class Figures:
    row: Row


def channel_of(orders: Sequence[Order]) -> tuple[Channel, io.StringIO]:
    answers = io.StringIO()
    return Channel(io.StringIO("".join(order_line(o).decode() for o in orders)), answers), answers


def counting_timer(
    calls: Mapping[Any, Callable[[], object]],
) -> Callable[[], Mapping[Any, float]]:
    """Each call takes as long as it says."""
    return lambda: {name: float(str(call())) for name, call in calls.items()}


def measure(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[Any],
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[Figures]:
    for row in rows:
        clock({"a": lambda: 1.5, 2: lambda: 2.5})
        yield Figures(row)


def test_a_worker_times_a_round_for_each_order_and_goes_on_to_the_next_row_when_told() -> None:
    channel, answers = channel_of([Order.TIME, Order.TIME, Order.NEXT, Order.TIME, Order.NEXT])
    rows: Any = [Row("x"), Row("y")]
    nobody: Any = None
    serve(channel, measure, rows, nobody, nobody, counting_timer)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    calls, times = {"calls": ["a", "2"], "us": []}, {"calls": [], "us": [1.5, 2.5]}
    assert lines == [calls, times, times, calls, times]


def test_a_worker_ends_when_its_parent_has_gone() -> None:
    channel, answers = channel_of([Order.TIME])
    rows: Any = [Row("x"), Row("y")]
    nobody: Any = None
    serve(channel, measure, rows, nobody, nobody, counting_timer)
    assert len(answers.getvalue().splitlines()) == 3


def test_what_a_worker_is_told_first_survives_the_way() -> None:
    begin = Begin(("a", "b"), 3, True)
    assert Channel(io.StringIO(begin_line(begin).decode()), io.StringIO()).begin() == begin


def test_the_dense_kind_times_the_delta_alone_and_behind_its_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loragate.bench.rows.LINEARS", {**LINEARS, "small": Linear(64, (32, 32))})

    def clock(calls: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
        for call in calls.values():
            call()
        return {name: float(number) for number, name in enumerate(calls)}

    assert KINDS["dense"].measure is dense.measure
    row = DenseRow("small", 2, 16)
    candidate = find_contender("torch")
    (found,) = dense.measure(candidate, None, [row], detect_machine(), clock, print)
    assert (found.row, found.us) == (
        row,
        {"base": 0.0, "delta": 1.0, "base and delta": 2.0},
    )


def test_builds_are_compared_by_the_replays_of_graphs_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Request] = []

    def compare(request: Request, machine: Machine, progress: object) -> SpeedFigures:
        asked.append(request)
        return SpeedFigures(request.kind, request.against, (), ResourcePairs("sm_90"))

    gpu = Machine("cuda", "", (9, 0), 132, 1 << 36)
    monkeypatch.setattr("loragate.commands.bench._gpu", lambda: gpu)
    monkeypatch.setattr("loragate.bench.speed.comparing.compare_builds", compare)
    main(["bench", "graphs", "--against", _CHECKOUT, "--record", str(tmp_path / "r.json")])
    replays = [row.id for row in graph_rows() if row.id.startswith("replay.")]
    assert asked == [Request("graphs", tuple(replays), None, _CHECKOUT)]
    # the worker finds the rows again by their ids, in the order of the table
    begin = Begin(tuple(replays), None, compiles=False)
    assert [row.id for row in _rows(KINDS["graphs"], begin)] == replays


def comparison(change: Change, ratio: float = 1.08) -> Comparison:
    return Comparison("qkv.m1.r16", "delta", 4.0, 4.0 * ratio, ratio, 1.07, 1.09, 1.02, change)


def test_the_terminal_names_each_change_and_shows_resources_of_both_builds() -> None:
    before = [("shrink", "x", Resources(40, 0, 1024)), ("gone", "x", Resources(8, 0, 0))]
    now = [("shrink", "x", Resources(64, 16, 1024)), ("new", "x", None)]
    figures = SpeedFigures(
        "dense",
        "main",
        (comparison(Change.SLOWER), comparison(Change.UNCHANGED), comparison(Change.UNDECIDED)),
        ResourcePairs("sm_90", pairs_of(before, now)),
    )
    shown = render_terminal(figures)
    sentence = (
        "slower: qkv.m1.r16 delta: 4.00 -> 4.32 us, +8.0 % (+7.0 % to +9.0 %); "
        "noise of this run reaches +2.0 %"
    )
    assert sentence in shown
    assert f"undecided:{sentence.removeprefix('slower:')}" in shown
    kernel = next(line for line in shown.splitlines() if line.startswith("shrink"))
    assert kernel.split() == ["shrink", "x", "40", "->", "64", "0", "->", "16", "1024"]
    assert "bench dense against main: 1 of 3 calls unchanged" in shown


def test_resources_that_could_not_be_compared_are_said_to_be_unknown() -> None:
    resources = ResourcePairs("sm_90", problem="v1: lorakernels.specs: cannot be imported")
    shown = render_terminal(SpeedFigures("dense", "v1", (comparison(Change.UNCHANGED),), resources))
    assert "resources of the kernels are not known: v1: lorakernels.specs" in shown


def test_kernels_of_both_builds_are_matched_by_name_and_specialisation() -> None:
    same = Resources(8, 0, 0)
    pairs = pairs_of([("k", "a", same), ("k", "b", same)], [("k", "b", same), ("k", "c", None)])
    assert pairs == (
        KernelPair("k", "a", same, None),
        KernelPair("k", "b", same, same),
        KernelPair("k", "c", None, None),
    )
    assert [p.specialisation for p in ResourcePairs("sm_90", pairs).changed] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("dense", "--baseline", "none"), ExitCode.USAGE, "leave out other subjects"),
        (("dense", "--subject", "torch"), ExitCode.USAGE, "leave out other subjects"),
        (("dense",), ExitCode.INFRASTRUCTURE, "needs a GPU"),
        (("streams", "--seed", "2"), ExitCode.INFRASTRUCTURE, "needs a GPU"),
        (("graphs",), ExitCode.INFRASTRUCTURE, "needs a GPU"),
        (("graphs", "--rows", "host.*"), ExitCode.USAGE, "matches none of the 12 rows"),
    ],
)
def test_two_builds_are_compared_without_other_subjects_and_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: ExitCode,
    message: str,
) -> None:
    cpu = Machine("cpu", "", None, 1, 0)
    monkeypatch.setattr("loragate.core.machine.detect_machine", lambda: cpu)
    assert main(["bench", *arguments, "--against", _CHECKOUT]) == code
    assert message in capsys.readouterr().err


def test_a_comparison_prints_its_table_notes_what_changed_and_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Request] = []

    def compare(request: Request, machine: Machine, progress: object) -> SpeedFigures:
        asked.append(request)
        found = (comparison(Change.SLOWER), comparison(Change.FASTER, 0.9))
        return SpeedFigures(request.kind, request.against, found, ResourcePairs("sm_90"))

    gpu = Machine("cuda", "", (9, 0), 132, 1 << 36)
    monkeypatch.setattr("loragate.commands.bench._gpu", lambda: gpu)
    monkeypatch.setattr("loragate.bench.speed.comparing.compare_builds", compare)
    record, events = tmp_path / "record.json", tmp_path / "events.jsonl"
    files = ("--record", str(record), "--events", str(events), "--run", "r")
    assert main(["bench", "dense", "--against", _CHECKOUT, *files]) == ExitCode.WRONG
    assert asked == [Request("dense", tuple(row.id for row in dense_rows()), None, _CHECKOUT)]
    assert "slower: qkv.m1.r16 delta" in capsys.readouterr().out
    notes = [event.text for event in read_events(events).events if isinstance(event, Note)]
    assert [note.partition(":")[0] for note in notes] == [
        "slower",
        "faster",
        f"bench dense against {_CHECKOUT}",
    ]
    section = require_section(record, "bench_dense_against")
    assert section["verdict"] == "wrong"
    assert [item["change"] for item in section["comparisons"]] == ["slower", "faster"]


def test_a_kind_that_has_no_single_calls_takes_no_other_build() -> None:
    without = [kind.name for kind in KINDS.values() if kind.measure_target is None]
    assert without == ["engine"]
    for name in without:
        with pytest.raises(SystemExit):
            main(["bench", name, "--against", "HEAD"])


def test_a_worker_measures_no_other_package_than_that_of_its_build(tmp_path: Path) -> None:
    _check_package(package_folder().parent)
    with pytest.raises(AssertionError, match="not the build in"):
        _check_package(tmp_path)
