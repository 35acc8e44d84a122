from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.cli import main
from loragate.core.checkout import Tree
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.events.durations import durations_of
from loragate.events.log import EventLog, EventWriter, read_events
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    Event,
    Expected,
    HostTestFinished,
    KnownFinding,
    LegFinished,
    Note,
    RunFinished,
    RunStarted,
    Sharding,
    ShardPart,
    Skipped,
)
from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import CasePattern
from loragate.matrix.case import Tier
from loragate.records.results import provenance, read_section, update_section
from loragate.report.merge import merged_events
from loragate.report.record import origin
from loragate.report.shard_reports import MergeError, ShardReport
from loragate.report.summary import Summary, summarize

PARTS = {1: ("mine.a", "mine.c"), 2: ("mine.b",), 3: ("mine.d", "mine.e")}
LEGS = {1: ("gpu", "compile"), 2: ("gpu",), 3: ("gpu", "host")}
Shards = dict[int, list[Event]]


def part_of(index: int) -> ShardPart:
    names = PARTS[index]
    row = Expected(leg="gpu", subject="mine", site="dense_delta", count=len(names), run_ids=names)
    return ShardPart(index=index, legs=LEGS[index], expected=(row,))


@pytest.fixture
def shards(plan: Callable[..., RunStarted], finished: Callable[..., CaseFinished]) -> Shards:
    """The events of three shards in which everything passed."""

    def events(index: int) -> list[Event]:
        own, others = part_of(index), tuple(part_of(i) for i in PARTS if i != index)
        started = plan(
            run=f"run {index}",
            legs=own.legs,
            expected=own.expected,
            shard=Sharding(index=index, count=3, others=others),
            commit="abc",
            versions={"torch": "2.13"},
        )
        ends = [
            LegFinished(
                name=leg,
                verdict=Verdict.PASS,
                exit_code=0,
                duration_s=2.0,
                log_path=f"logs/{leg}.log",
            )
            for leg in own.legs
        ]
        end = RunFinished(finished_at=f"2026-11-21T04:15:4{index}+00:00", duration_s=index * 10.0)
        tests = [HostTestFinished(leg="host", test="t::a", verdict=Verdict.PASS, duration_s=0.1)]
        host = tests if "host" in own.legs else []
        return [started, *map(finished, PARTS[index]), *host, *ends, end]

    return {index: events(index) for index in PARTS}


def report(index: int, events: Sequence[Event]) -> ShardReport:
    return ShardReport(f"r{index}", EventLog(tuple(events)), f"logs/{index}")


def merged(shards: Shards) -> Summary:
    reports = [report(index, events) for index, events in shards.items()]
    return summarize(EventLog(merged_events(reports, run="merged")))


def changed(events: list[Event], **changes: Any) -> list[Event]:
    start, *rest = events
    assert isinstance(start, RunStarted)
    return [replace(start, **changes), *rest]


def test_shards_that_passed_are_one_run_that_passed(shards: Shards) -> None:
    summary = merged(shards)
    assert (summary.verdict, summary.reasons) == (Verdict.PASS, ())
    assert (summary.total.expected, summary.total.passed) == (5, 5)
    assert summary.plan is not None
    assert (summary.plan.run, summary.plan.shard) == ("merged", None)
    assert summary.finished is not None
    assert summary.finished.duration_s == 30.0
    assert [leg.name for leg in summary.legs] == ["gpu 1", "compile", "gpu 2", "gpu 3", "host"]
    assert summary.legs[2].finished is not None
    assert summary.legs[2].finished.log_path == "logs/2/logs/gpu.log"
    assert summary.notes == ()


def test_what_each_shard_left_out_is_counted(shards: Shards) -> None:
    for index in PARTS:
        skip = Skipped(run_id=f"mine.{index}", subject="mine", site="dense_delta", reason="no")
        shards[index] = changed(shards[index], skipped=(skip,))
    assert merged(shards).total.skipped == 3


def test_a_missing_shard_leaves_the_run_incomplete_and_names_its_cases_and_legs(
    shards: Shards,
) -> None:
    del shards[3]
    summary = merged(shards)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.missing == ("mine.d", "mine.e")
    assert "shard 3/3 is missing: no report of it was given" in summary.notes
    assert "leg host: inconclusive: did not run" in summary.reasons
    assert "2 planned cases were never started" in summary.reasons


def test_a_shard_that_was_killed_leaves_the_run_incomplete(shards: Shards) -> None:
    shards[2] = shards[2][:2]
    summary = merged(shards)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "shard 2/3 did not come to its end (r2)" in summary.notes
    assert "the run did not come to its end" in summary.reasons


def test_one_wrong_case_fails_the_merged_run(
    shards: Shards, finished: Callable[..., CaseFinished]
) -> None:
    shards[1].append(finished("mine.a", Verdict.INCONCLUSIVE, judgements=()))
    assert merged(shards).exit_code is ExitCode.INCOMPLETE
    shards[3].append(LegFinished(name="host", verdict=Verdict.FAIL, exit_code=1, duration_s=1.0))
    assert merged(shards).exit_code is ExitCode.WRONG


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"commit": "def"}, "commit differs: abc in r1, def in r2"),
        ({"judged": "12ab"}, "judged differs: none in r1, 12ab in r2"),
        ({"draws": (0, 1)}, "draws differs: none in r1, 0, 1 in r2"),
        ({"repeats": 2}, "repeats differs: 1 in r1, 2 in r2"),
        ({"tier": Tier.NIGHTLY}, "tier differs: premerge in r1, nightly in r2"),
        ({"patterns": ("rank-8",)}, "patterns differs: none in r1, rank-8 in r2"),
        ({"matrix": ("own.yaml",)}, r"matrix differs: none in r1, own\.yaml in r2"),
        ({"subjects": ("mine", "torch")}, "subjects differs: mine in r1, mine, torch in r2"),
        ({"shard": None}, "r2: is no shard: it was run without --shard"),
        ({"shard": Sharding(index=2, count=4, others=())}, "r1 is one of 3 shards, r2 one of 4"),
    ],
)
def test_shards_of_different_runs_are_refused_with_the_difference(
    shards: Shards, changes: dict[str, Any], problem: str
) -> None:
    shards[2] = changed(shards[2], **changes)
    with pytest.raises(MergeError, match=problem):
        merged(shards)


def known(version: str) -> KnownFinding:
    finding = Finding(
        id="far-rows",
        subject="mine",
        versions=">=0.26,<0.27",
        kind=Kind.DEFECT,
        title="Far rows are lost",
        statement="It is so.",
        evidence="1 is 2",
        seen_on="0.26.0, H200",
        case=CasePattern("mine.*", OracleName.EXACT, (Failure.WRONG_ANSWER,)),
    )
    return KnownFinding(finding=finding, version=version)


def test_a_finding_of_one_version_excuses_no_shard_with_a_version_that_it_does_not_list(
    shards: Shards, finished: Callable[..., CaseFinished]
) -> None:
    wrong = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, "row 3 is zero")
    for index, version in ((1, "0.26.0"), (2, "0.26.1"), (3, "0.26.0")):
        shards[index] += [known(version), finished("mine.a", Verdict.FAIL, judgements=(wrong,))]
    assert merged(shards).verdict is Verdict.PASS
    shards[2][-2] = known("0.27.0")
    with pytest.raises(MergeError) as refused:
        merged(shards)
    assert str(refused.value) == (
        "finding far-rows is listed for version 0.26.0 in r1, and not for 0.27.0 in r2 "
        "(>=0.26,<0.27): it would excuse failures of both"
    )


def test_a_shard_that_is_given_twice_is_refused(shards: Shards) -> None:
    reports = [report(1, shards[1]), report(2, shards[1])]
    with pytest.raises(MergeError, match="r1 and r2 are both shard 1/3"):
        merged_events(reports, run="merged")


def test_shards_that_were_cut_differently_are_refused_with_a_case_that_shows_it(
    shards: Shards,
) -> None:
    start = shards[2][0]
    assert isinstance(start, RunStarted)
    row = replace(start.expected[0], count=2, run_ids=("mine.b", "mine.a"))
    shards[2] = changed(shards[2], expected=(row,))
    with pytest.raises(MergeError, match=r"mine\.a is in shard 1 by r1, in shard 1, 2 by r2"):
        merged(shards)


def test_a_report_without_a_plan_is_refused(shards: Shards) -> None:
    shards[2] = shards[2][1:]
    with pytest.raises(MergeError, match="r2: no plan is recorded"):
        merged(shards)


def test_differences_of_the_environments_and_notes_of_shards_are_shown(shards: Shards) -> None:
    shards[2] = changed(shards[2], versions={"torch": "2.12"})
    shards[2].append(Note(text="a note"))
    notes = merged(shards).notes
    assert "torch differs: 2.13 in shard 1, 2.12 in shard 2, 2.13 in shard 3" in notes
    assert "shard 2: a note" in notes


def test_a_shard_with_local_changes_is_named_because_nothing_compares_them(
    shards: Shards,
) -> None:
    clean = {index: changed(events, tree=Tree.CLEAN) for index, events in shards.items()}
    assert not merged(clean).notes
    for index in shards:
        summary = merged({**clean, index: changed(shards[index], tree=Tree.DIRTY)})
        (note,) = summary.notes
        assert note.startswith(f"shard {index}/")
        assert note.endswith("had local changes, which others may not have had")
        assert summary.plan is not None
        assert summary.plan.tree is Tree.DIRTY


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        ((Tree.CLEAN, Tree.UNKNOWN, Tree.CLEAN), Tree.UNKNOWN),
        ((Tree.UNKNOWN, Tree.DIRTY, Tree.CLEAN), Tree.DIRTY),
        ((Tree.DIRTY, Tree.UNKNOWN, Tree.UNKNOWN), Tree.DIRTY),
    ],
)
def test_a_merged_run_is_of_a_tree_as_doubtful_as_that_of_any_shard(
    shards: Shards, trees: tuple[Tree, ...], expected: Tree
) -> None:
    of = dict(zip(shards, trees, strict=True))
    plan = merged({k: changed(events, tree=of[k]) for k, events in shards.items()}).plan
    assert plan is not None
    assert plan.tree is expected


def test_host_tests_keep_their_leg_and_workers_name_their_shard(
    shards: Shards, finished: Callable[..., CaseFinished]
) -> None:
    test = HostTestFinished(leg="host", test="t", verdict=Verdict.PASS, duration_s=1.0)
    shards[3].append(test)
    events = merged_events([report(i, events) for i, events in shards.items()], run="m")
    assert test in events
    workers = {e.worker for e in events if isinstance(e, CaseFinished)}
    assert workers == {"1/gw0", "2/gw0", "3/gw0"}


def test_what_fails_beside_the_cases_of_a_shard_belongs_to_their_leg_of_that_shard(
    shards: Shards,
) -> None:
    broken = HostTestFinished(leg="gpu", test="cases/x.py", verdict=Verdict.FAIL, duration_s=1.0)
    for index in (1, 2):
        shards[index].append(broken)
    assert [(test.leg, test.test) for test in merged(shards).bad_host_tests] == [
        ("gpu 1", "cases/x.py"),
        ("gpu 2", "cases/x.py"),
    ]


@pytest.mark.parametrize("index", PARTS)
def test_a_case_that_kills_its_worker_in_one_shard_fails_the_merged_run(
    shards: Shards, index: int
) -> None:
    name = PARTS[index][0]
    shards[index] = [e for e in shards[index] if getattr(e, "run_id", "") != name]
    shards[index].append(CaseStarted(run_id=name, worker="gw0", draw=0, seed=1))
    (case,) = merged(shards).troubles
    assert (case.run_id, case.verdict, case.failure) == (name, Verdict.FAIL, Failure.CRASH)


def test_what_could_not_be_read_of_a_shard_is_named(shards: Shards) -> None:
    torn = EventLog(tuple(shards[2]), damaged=2)
    reports = [report(1, shards[1]), ShardReport("r2", torn, "logs/2"), report(3, shards[3])]
    summary = summarize(EventLog(merged_events(reports, run="m")))
    assert summary.notes == ("shard 2/3: 2 records torn or damaged were left out",)


def write(folder: Path, events: Sequence[Event], run: str) -> str:
    with EventWriter(folder / "events.jsonl", run=run) as writer:
        for event in events:
            writer.write(event)
    return str(folder)


def test_the_command_writes_all_pages_and_takes_the_logs_along(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write(tmp_path / f"shard {i}", e, f"run {i}") for i, e in shards.items()]
    log = tmp_path / "shard 3" / "logs" / "host.log"
    log.parent.mkdir()
    log.write_text("text")
    out = tmp_path / "out"
    assert main(["merge", *folders, "--report", str(out)]) == ExitCode.OK
    assert {"index.html", "junit.xml", "events.jsonl"} <= {path.name for path in out.iterdir()}
    assert (out / "logs" / "3" / "logs" / "host.log").read_text() == "text"
    assert summarize(read_events(out / "events.jsonl")).verdict is Verdict.PASS
    assert main(["merge", *folders[:2], "--report", str(out)]) == ExitCode.INCOMPLETE
    assert "shard 3/3 is missing" in capsys.readouterr().out
    assert main(["merge", *folders, "--report", folders[0]]) == ExitCode.USAGE
    assert "is the report of a shard" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "none")]) == ExitCode.USAGE


FOUND = {
    "versions": {"torch": "2.13"},
    "machine": {
        "system": "Linux",
        "cores": "8",
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "compute_capability": "9.0",
        "num_sms": "132",
        "device_memory_bytes": "1024",
        "driver": "580",
        "gpus": "2",
    },
}


def merge(shards: Shards, tmp_path: Path) -> tuple[int, dict[str, Any] | None]:
    """The exit code of a merge that records, and what it has recorded."""
    folders = [write(tmp_path / f"shard {i}", e, f"run {i}") for i, e in shards.items()]
    record = tmp_path / "results.json"
    code = main(["merge", *folders, f"--report={tmp_path / 'out'}", f"--record={record}"])
    section = "gate_seeds_mine" if len(draws_of(shards)) > 1 else "gate"
    return code, read_section(record, section)


def draws_of(shards: Shards) -> tuple[int, ...]:
    start = next(iter(shards.values()))[0]
    assert isinstance(start, RunStarted)
    return start.draws


@pytest.mark.parametrize("draws", [(0,), (0, 1)])
def test_merged_shards_are_recorded_as_one_run_of_the_machine_that_they_ran_on(
    shards: Shards, tmp_path: Path, draws: tuple[int, ...]
) -> None:
    parts = {i: changed(events, draws=draws, **FOUND) for i, events in shards.items()}
    for index in parts:
        ends = [event for event in parts[index] if isinstance(event, CaseFinished)]
        parts[index][1:1] = [replace(end, draw=draw) for end in ends for draw in draws[1:]]
    code, section = merge(parts, tmp_path)
    assert code == ExitCode.OK
    assert section is not None
    assert section["verdict"] == "pass"
    assert (section["commit"], section["versions"]) == ("abc", {"torch": "2.13"})
    machine = section["machine"]
    assert (machine["name"], machine["driver"], machine["num_sms"]) == ("NVIDIA H200", "580", 132)
    assert (machine["compute_capability"], machine["memory_bytes"]) == ([9, 0], 1024)
    assert (section["shards"], section["draws"], section["duration_s"]) == (3, len(draws), 30.0)
    # of each shard
    assert section["gpus"] == 2
    assert sum(count["passed"] for count in section["counts"]) == 5


@pytest.mark.parametrize("end", [None, 2])
def test_shards_that_are_no_whole_run_leave_the_record_as_it_was(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: int | None
) -> None:
    update_section(tmp_path / "results.json", "gate", {"verdict": "pass"})
    parts = {index: changed(events, draws=(0,)) for index, events in shards.items()}
    if end is None:
        del parts[3]
    else:
        parts[3] = parts[3][:end]
    code, section = merge(parts, tmp_path)
    assert code == ExitCode.INCOMPLETE
    assert section == {"verdict": "pass"}
    said = "is missing: no report of it was given" if end is None else "did not come to its end"
    assert f"shard 3/3 {said}" in (err := capsys.readouterr().err)
    assert f"{tmp_path / 'results.json'} stays as it was" in err
    assert (tmp_path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"patterns": ("tokens-21", "rank-8")},
            "every case; the shards were run with --cases tokens-21 --cases rank-8",
        ),
        ({"draws": ()}, "draws from 0 on; the shards have none"),
        ({"draws": (3,)}, "draws from 0 on; the shards have 3"),
        ({"draws": (0, 2)}, "draws from 0 on; the shards have 0, 2"),
    ],
)
def test_shards_of_a_part_of_the_cases_or_draws_are_refused_as_a_record(
    shards: Shards,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    complaint: str,
) -> None:
    parts = {index: changed(events, **{"draws": (0,)} | change) for index, events in shards.items()}
    assert merge(parts, tmp_path) == (ExitCode.USAGE, None)
    assert f"loragate merge: --record takes {complaint}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {"torch": "2.14"}},
        {"machine": {**FOUND["machine"], "device_name": "NVIDIA H100"}},
    ],
)
def test_shards_of_different_machines_are_refused_as_a_record(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    parts = {index: changed(e, draws=(0,), **FOUND) for index, e in shards.items()}
    parts[2] = changed(parts[2], **change)
    assert merge(parts, tmp_path) == (ExitCode.USAGE, None)
    assert "--record takes one machine" in capsys.readouterr().err


def test_a_merged_record_says_where_it_comes_from_in_the_words_of_any_other(
    plan: Callable[..., RunStarted],
) -> None:
    merged_run, own = origin(plan(**FOUND)), provenance(Machine("cpu", "x86_64", None, 1, 0))
    assert merged_run.keys() == own.keys()
    assert merged_run["machine"].keys() == own["machine"].keys()


def test_a_log_that_cannot_be_copied_costs_a_note_and_no_verdict(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write(tmp_path / f"shard {i}", e, f"run {i}") for i, e in shards.items()]
    logs = tmp_path / "shard 3" / "logs"
    logs.mkdir()
    (logs / "gone.log").symlink_to("nowhere")
    (logs / "host.log").write_text("text")
    out = tmp_path / "out"
    assert main(["merge", *folders, "--report", str(out)]) == ExitCode.OK
    assert f"note: {logs / 'gone.log'}: was not copied: [Errno 2]" in capsys.readouterr().out
    assert (out / "logs" / "3" / "logs" / "host.log").read_text() == "text"
    assert {"index.html", "junit.xml"} <= {path.name for path in out.iterdir()}


def test_the_report_of_a_single_shard_says_that_it_is_one(shards: Shards) -> None:
    summary = summarize(EventLog(tuple(shards[2])))
    assert summary.verdict is Verdict.PASS
    assert summary.notes == ("this is shard 2/3; `loragate merge` judges the whole run",)


def test_durations_are_those_of_all_runs_of_a_case_and_of_the_other_legs(
    shards: Shards, tmp_path: Path, finished: Callable[..., CaseFinished]
) -> None:
    left_out = Skipped(run_id="mine.z", subject="mine", site="dense_delta", reason="no")
    events = [*changed(shards[1], skipped=(left_out,)), finished("mine.a", draw=1, duration_s=1.75)]
    folder = Path(write(tmp_path / "report", events, "r"))
    found = durations_of(folder)
    assert found.cases == {"mine.a": 2.0, "mine.c": 0.25, "mine.z": 0.0}
    # the leg of the cases took 2 s for 2.25 s of cases
    assert found.legs == {"compile": pytest.approx(2.0 * 2.25 / 2.0)}
    assert durations_of(folder / "events.jsonl") == found
