from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.cli import main
from loragate.commands import faults as cli
from loragate.core.checkout import Tree
from loragate.core.verdict import ExitCode, Failure, OracleName, Verdict
from loragate.faults import search
from loragate.faults.corpus import CONTROLS, FAULTS
from loragate.faults.model import (
    Control,
    Fate,
    Fault,
    GateItem,
    Killer,
    Needs,
    Outcome,
    Part,
    Sighting,
)
from loragate.faults.record import SECTION, Line, payload, upgraded
from loragate.faults.tables import render_detection, render_markdown, render_terminal
from loragate.records import recorder
from loragate.records.results import ResultsError

FAULT = next(fault for fault in FAULTS if fault.name == "scale-of-slot-0")
OTHER = next(fault for fault in FAULTS if fault.name == "rslora-ignored")
CONTROL = CONTROLS[0]


def line(fault: Fault = FAULT, fate: Fate = Fate.KILLED, **fields: Any) -> Line:
    baseline = fields.pop("baseline", None)
    other = Outcome(name=fault.name, fate=baseline) if baseline else None
    return Line(fault, Outcome(name=fault.name, fate=fate, **fields), other)


def detected(
    fault: Fault,
    *judges: str,
    part: Part | None = Part.CASE,
) -> Line:
    """A killed fault that `judges` of a part of the gate detected."""
    failed = Sighting(
        judge="", case="", verdict=Verdict.FAIL, failure=Failure.WRONG_ANSWER, part=part
    )
    sightings = tuple(replace(failed, judge=judge) for judge in judges)
    return line(fault, killers=judges, sightings=sightings)


def control(fate: Fate) -> tuple[Control, Outcome]:
    return CONTROL, Outcome(name=CONTROL.name, fate=fate)


PASSING, FAILING, BROKEN = control(Fate.SURVIVED), control(Fate.KILLED), control(Fate.BROKEN)


@pytest.mark.parametrize(
    ("fates", "judged", "code"),
    [
        ((Fate.KILLED, Fate.NOT_RUN), PASSING, ExitCode.OK),
        ((Fate.KILLED, Fate.SURVIVED), PASSING, ExitCode.WRONG),
        ((Fate.KILLED, Fate.MISSED), PASSING, ExitCode.WRONG),
        ((Fate.KILLED,), FAILING, ExitCode.WRONG),
        ((Fate.BROKEN, Fate.SURVIVED), PASSING, ExitCode.INFRASTRUCTURE),
        ((Fate.KILLED,), BROKEN, ExitCode.INFRASTRUCTURE),
        ((Fate.NOT_RUN,), PASSING, ExitCode.INCOMPLETE),
        ((Fate.NOT_RUN,), FAILING, ExitCode.WRONG),
        ((), PASSING, ExitCode.OK),
    ],
)
def test_the_exit_code_is_0_only_if_all_are_killed_and_all_controls_pass(
    fates: tuple[Fate, ...], judged: tuple[Control, Outcome], code: ExitCode
) -> None:
    assert cli.exit_code([line(fate=fate) for fate in fates], [judged]) is code


def test_a_run_that_planted_nothing_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code([], []) is ExitCode.INCOMPLETE
    of_gpu = next(fault for fault in FAULTS if fault.needs is Needs.GPU)
    assert main(["faults", "--only", of_gpu.name]) == ExitCode.INCOMPLETE
    assert "nothing could be planted" in capsys.readouterr().err


def test_a_baseline_suite_that_could_not_run_is_an_infrastructure_failure() -> None:
    lines = [line(baseline=Fate.BROKEN)]
    assert cli.exit_code(lines, [PASSING]) is ExitCode.INFRASTRUCTURE
    text = render_terminal(lines, [PASSING])
    assert text.startswith(f"BROKEN BASELINE SUITE {FAULT.name}")
    assert "| **all** | 1 | 0 / 1 | 0 | 1 |  |" in render_markdown(payload(lines, [PASSING]))


@pytest.mark.parametrize(
    "given", [["--only", FAULT.name], ["--only", FAULT.name, "--gpu"], ["--slice"], []]
)
def test_the_baseline_suite_always_runs_on_a_control_too(given: list[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    faults, controls = cli.select(parser.parse_args(["faults", "--baseline-suite", *given]))
    assert FAULT in faults or "--slice" in given
    assert controls


def test_an_undetected_fault_comes_first_with_its_replay_command() -> None:
    text = render_terminal([line(), line(OTHER, Fate.SURVIVED, message="not detected")], [PASSING])
    first, why, message, again, *_ = text.splitlines()
    assert first == f"SURVIVED {OTHER.name} ({OTHER.source})"
    assert (why.strip(), message.strip()) == (OTHER.why, "not detected")
    assert again.strip() == f"again: loragate faults --only {OTHER.name}"
    assert text.splitlines()[-1] == "2 faults: 1 killed, 1 survived; 1 of 1 controls pass"


def test_a_control_that_fails_is_a_false_alarm() -> None:
    assert render_terminal([], [FAILING]).startswith(f"FALSE ALARM {CONTROL.name}")


def test_the_matrix_shows_required_and_actual_detection() -> None:
    def seen(judge: str, verdict: Verdict) -> Sighting:
        failure = Failure.WRONG_ANSWER if verdict is Verdict.FAIL else None
        return Sighting(judge=judge, case="", verdict=verdict, failure=failure)

    sightings = (seen("reference", Verdict.FAIL), seen("repeat", Verdict.PASS))
    missed = line(fate=Fate.MISSED, killers=("reference", "canary"), sightings=sightings)
    row = next(r for r in render_terminal([missed], []).splitlines() if r.startswith(FAULT.name))
    # exact and permute were required, canary was not, repeat passed, the others did not run
    assert row.removeprefix(FAULT.name).split() == ["X", "-", "+", ".", "-", "-", "missed"]


def test_kill_rates_count_only_what_could_run_and_show_both_sides() -> None:
    lines = [
        replace(detected(FAULT, "exact"), baseline=Outcome(name="", fate=Fate.SURVIVED)),
        replace(detected(OTHER, "a", part=None), baseline=Outcome(name="", fate=Fate.KILLED)),
        line(FAULTS[-1], Fate.NOT_RUN),
    ]
    record = json.loads(json.dumps(payload(lines, [PASSING])))
    rows = render_markdown(record).splitlines()
    head = "| where the fault is | faults | detected by the gate | of these by a case |"
    assert rows[0].startswith(head)
    assert "| expand | 1 | 1 / 1 | 1 | 0 | 0 / 1 |" in rows
    assert "| adapter files and activation | 1 | 0 / 1 | 0 | 1 | 1 / 1 |" in rows
    assert rows[-1] == "| **all** | 2 | 1 / 2 | 1 | 1 | 1 / 2 |"


def test_the_gate_is_not_credited_with_what_no_part_of_it_detects() -> None:
    launch = replace(OTHER, name="a-launch")
    lines = [
        detected(FAULT, "reference"),
        detected(launch, "qkv-bf16-r1-t512", part=Part.LAUNCH),
        detected(OTHER, "a", part=None),
    ]
    rows = render_detection(payload(lines, [PASSING])).splitlines()
    assert rows[-1] == "| **all faults** | 3 | 2 | 1 | 1 | not measured yet |"
    # nor with what another one has detected than the one that must
    missed = detected(replace(FAULT, name="missed"), "permute")
    missed = replace(missed, outcome=replace(missed.outcome, fate=Fate.MISSED))
    rows = render_detection(payload([*lines, missed], [PASSING])).splitlines()
    assert rows[-1] == "| **all faults** | 4 | 2 | 1 | 1 | not measured yet |"


@pytest.mark.parametrize("verdict", [Verdict.SKIP, Verdict.INCONCLUSIVE, Verdict.PASS])
def test_a_part_of_the_gate_that_did_not_fail_has_detected_nothing(verdict: Verdict) -> None:
    seen = Sighting(judge="exact", case="", verdict=verdict, part=Part.CASE)
    recorded = payload([line(sightings=(seen,))], [PASSING])["faults"][FAULT.name]
    assert (recorded["detected_by"], recorded["detected_by_gate"]) == ([], False)


def test_a_record_says_which_parts_of_the_gate_have_detected_a_fault() -> None:
    lines = [detected(FAULT, "reference"), detected(OTHER, "tests/a.py::b", part=Part.HOST_TEST)]
    recorded = payload(lines, [])["faults"]
    assert recorded[FAULT.name]["detected_by"] == ["case"]
    assert recorded[OTHER.name]["detected_by"] == ["host test"]
    assert recorded[FAULT.name]["detected_by_gate"]
    assert recorded[OTHER.name]["detected_by_gate"]


def test_a_record_of_an_earlier_version_is_read_with_the_keys_of_today() -> None:
    earlier = {
        "group": "experts: adapter files",
        "killers": ["expert_files", "exact"],
        "detected_by_gate": True,
        "stand_in": "survived",
        "stand_in_killers": [],
    }
    now = upgraded({"commit": "c", "faults": {"a": earlier}})
    assert now["faults"]["a"] == {
        "group": "MoE: adapter files",
        "killers": ["expert_files", "exact"],
        "baseline_suite": "survived",
        "baseline_suite_killers": [],
        "detected_by_gate": True,
        "detected_by": ["case"],
    }
    assert upgraded(now) == now


def test_a_record_that_does_not_know_what_the_gate_detected_is_refused() -> None:
    older = {"group": "expand", "killers": ["partition"]}
    with pytest.raises(ResultsError, match="whether the gate has detected a: an earlier version"):
        upgraded({"commit": "c", "faults": {"a": older}})


@pytest.mark.parametrize("faults", [5, [1], {"a": 5}])
def test_a_record_without_objects_of_faults_is_refused(faults: object) -> None:
    with pytest.raises(ResultsError, match="must have an object for each of them"):
        upgraded({"commit": "c", "faults": faults})


def test_a_name_that_nothing_has_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["faults", "--only", "scale-of-slot-zero"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "there is no fault or control like 'scale-of-slot-zero'" in error
    assert "did you mean scale-of-slot-0?" in error


def test_a_search_for_killers_takes_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--find-killers", "scale-of-slot"]) == ExitCode.USAGE
    assert "did you mean scale-of-slot-0?" in capsys.readouterr().err


@pytest.mark.parametrize("found", [True, False])
def test_what_a_search_finds_is_printed_as_the_file_has_it(
    found: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killers = (Killer(GateItem(Part.CASE, "a.case"), OracleName.EXACT),) if found else ()
    monkeypatch.setattr(search, "find_killers", lambda *_: killers)
    code = main(["faults", "--find-killers", FAULT.name])
    said = capsys.readouterr().out.splitlines()
    if found:
        assert (code, said) == (
            ExitCode.OK,
            [f"{FAULT.name}:", "- case: a.case", "  by: [exact]"],
        )
    else:
        assert (code, said) == (ExitCode.WRONG, [f"{FAULT.name}: []"])


def test_a_gpu_is_left_to_the_faults_that_need_one_unless_others_are_named() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    alone, _ = cli.select(parser.parse_args(["faults", "--gpu"]))
    assert {fault.needs for fault in alone} == {Needs.GPU}
    named, _ = cli.select(parser.parse_args(["faults", "--gpu", "--only", FAULT.name]))
    assert named == [FAULT]


def test_names_add_up_however_they_are_given() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    other = next(fault for fault in FAULTS if fault.needs is Needs.CPU and fault != FAULT)
    given = ["faults", "--only", FAULT.name, "--only", other.name]
    faults, _ = cli.select(parser.parse_args(given))
    assert {fault.name for fault in faults} >= {FAULT.name, other.name}


def test_a_number_of_jobs_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--slice", "--jobs", "0"]) == ExitCode.USAGE
    assert "--jobs must be at least 1 (got 0)" in capsys.readouterr().err


def test_a_record_takes_no_slice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--slice", "--record", str(tmp_path / "cpu.json")]) == ExitCode.USAGE
    assert "--record takes whole faults; leave out --slice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--show", "ci/results/cpu.json"], ["--find-killers", FAULT.name]]
)
def test_what_plants_nothing_takes_no_record(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    assert main(["faults", *arguments, "--record", str(path)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert (
        error == f"loragate faults: {arguments[0]} plants nothing to record; leave out --record\n"
    )
    assert not path.exists()


def only(path: Path, monkeypatch: pytest.MonkeyPatch, fate: Fate) -> ExitCode:
    """Plant FAULT alone and record it, without a process."""

    def plant(*_: Any) -> Any:
        yield FAULT, (Outcome(name=FAULT.name, fate=fate),)

    monkeypatch.setattr(cli, "_plant", plant)
    return main(["faults", "--only", FAULT.name, "--record", str(path), "--commit", "new"])


def recorded(tmp_path: Path, **changes: str) -> tuple[Path, dict[str, Any]]:
    """A record in which every fault was killed at an old commit, and its section."""
    controls = [(c, Outcome(name=c.name, fate=Fate.SURVIVED)) for c in CONTROLS]
    section = payload([line(fault) for fault in FAULTS], controls, commit="old")
    section |= changes
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schema": 1, "sections": {SECTION: section}}))
    return path, section


def test_a_record_keeps_what_is_not_planted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, section = recorded(tmp_path)
    assert only(path, monkeypatch, Fate.SURVIVED) == ExitCode.WRONG
    record = json.loads(path.read_text())["sections"][SECTION]
    fates = {name: fault["fate"] for name, fault in record["faults"].items()}
    assert fates.pop(FAULT.name) == "survived"
    assert set(fates.values()) == {"killed"}
    assert record["faults"][OTHER.name]["commit"] == "old"
    assert record["faults"][FAULT.name]["commit"] != "old"
    assert record["controls"] == section["controls"]


@pytest.mark.parametrize(
    ("digest", "kept"), [(FAULT.digest, ("killed", ["dense"])), ("of another edit", (None, []))]
)
def test_a_run_without_the_baseline_suite_keeps_what_it_said_of_the_same_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, kept: tuple[object, object]
) -> None:
    path = tmp_path / "cpu.json"
    controls = [(c, Outcome(name=c.name, fate=Fate.SURVIVED)) for c in CONTROLS]
    section = payload([line(fault) for fault in FAULTS], controls, commit="old")
    said = {"baseline_suite": "killed", "baseline_suite_killers": ["dense"], "digest": digest}
    section["faults"][FAULT.name] |= said
    path.write_text(json.dumps({"schema": 1, "sections": {SECTION: section}}))
    only(path, monkeypatch, Fate.KILLED)
    entry = json.loads(path.read_text())["sections"][SECTION]["faults"][FAULT.name]
    assert (entry["baseline_suite"], entry["baseline_suite_killers"]) == kept


def test_a_kept_entry_of_a_tree_with_changes_still_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = recorded(tmp_path, commit="old", tree="dirty")
    for _ in range(2):
        only(path, monkeypatch, Fate.KILLED)
        kept = json.loads(path.read_text())["sections"][SECTION]["faults"]
        assert (kept[OTHER.name]["commit"], kept[OTHER.name]["tree"]) == ("old", "dirty")
        assert "tree" not in kept[FAULT.name]


def test_a_run_of_a_tree_with_changes_leaves_entries_of_older_commits_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, section = recorded(tmp_path)
    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: ("newer", Tree.DIRTY))
    # the second run reads what the first one has kept
    for _ in range(2):
        only(path, monkeypatch, Fate.KILLED)
        record = json.loads(path.read_text())["sections"][SECTION]
        assert (record["commit"], record["tree"]) == ("newer", "dirty")
        assert record["faults"][OTHER.name] == section["faults"][OTHER.name]
        assert record["controls"] == section["controls"]


def test_a_record_keeps_what_another_run_recorded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = recorded(tmp_path)

    def plant(*_: Any) -> Any:
        document = json.loads(path.read_text())
        document["sections"][SECTION]["faults"][OTHER.name]["fate"] = "missed"
        path.write_text(json.dumps(document))
        yield FAULT, (Outcome(name=FAULT.name, fate=Fate.SURVIVED),)

    monkeypatch.setattr(cli, "_plant", plant)
    main(["faults", "--only", FAULT.name, "--record", str(path)])
    faults = json.loads(path.read_text())["sections"][SECTION]["faults"]
    assert (faults[FAULT.name]["fate"], faults[OTHER.name]["fate"]) == ("survived", "missed")


@pytest.mark.parametrize("edited", [False, True])
def test_a_record_of_code_that_was_edited_meanwhile_is_of_a_dirty_tree(
    edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, commits = tmp_path / "cpu.json", ["first"]

    def plant(*_: Any) -> Any:
        for one in FAULTS[:2]:
            if edited:
                commits.append("made meanwhile")
            yield one, (Outcome(name=one.name, fate=Fate.NOT_RUN),)

    monkeypatch.setattr(cli, "_plant", plant)
    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: (commits[-1], Tree.CLEAN))
    main(["faults", "--record", str(path)])
    record = json.loads(path.read_text())["sections"][SECTION]
    assert (record["commit"], record["tree"]) == ("first", "dirty" if edited else "clean")


def test_a_record_is_not_completed_with_what_no_longer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.json"
    controls = [(c, Outcome(name=c.name, fate=Fate.SURVIVED)) for c in CONTROLS]
    section = payload([line(fault) for fault in FAULTS], controls)
    section["faults"][OTHER.name]["digest"] = "of another fault"
    path.write_text(json.dumps({"schema": 1, "sections": {SECTION: section}}))
    before = path.read_text()
    assert only(path, monkeypatch, Fate.KILLED) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"has no valid entry for 1 faults that --only leaves out: {OTHER.name}" in error
    assert path.read_text() == before


@pytest.mark.parametrize("earlier", [False, True])
def test_what_was_done_before_an_interruption_is_recorded_and_not_taken_for_all(
    earlier: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cpu.json"
    # the whole record is written after each of them
    faults, some_controls = FAULTS[:40], CONTROLS[:4]
    monkeypatch.setattr(cli, "FAULTS", faults)
    monkeypatch.setattr(cli, "CONTROLS", some_controls)
    if earlier:
        controls = [(c, Outcome(name=c.name, fate=Fate.SURVIVED)) for c in some_controls]
        section = payload([line(fault) for fault in faults], controls, commit="old")
        path.write_text(json.dumps({"schema": 1, "sections": {SECTION: section}}))
    arguments = ["faults", "--record", str(path), "--commit", "new"]
    everything = [*faults, *some_controls]

    def planting(names: set[str], *, to_the_end: bool) -> None:
        def plant(*_: Any) -> Any:
            for one in everything:
                if one.name in names:
                    fate = Fate.MISSED if isinstance(one, Fault) else Fate.SURVIVED
                    yield one, (Outcome(name=one.name, fate=fate),)
            if not to_the_end:
                raise KeyboardInterrupt

        monkeypatch.setattr(cli, "_plant", plant)

    def recorded() -> dict[str, Any]:
        record: dict[str, Any] = json.loads(path.read_text())["sections"][SECTION]
        return record

    first, second, *rest = [one.name for one in everything]
    planting({first, second}, to_the_end=False)
    assert main(arguments) == ExitCode.INCOMPLETE
    assert recorded()["faults"][first]["fate"] == recorded()["faults"][second]["fate"] == "missed"
    assert (rest[0] in recorded()["faults"]) is earlier
    assert recorded()["unfinished"] == rest
    assert main(["faults", "--show", str(path)]) == ExitCode.INCOMPLETE
    assert f"{len(rest)} not planted yet: {rest[0]}, " in capsys.readouterr().err
    if earlier:
        # a run of something else leaves open what it was not asked for
        planting({first}, to_the_end=True)
        assert main([*arguments, "--only", first]) == ExitCode.WRONG
        assert recorded()["unfinished"] == rest
    planting({rest[0]}, to_the_end=False)
    assert main([*arguments, "--only", *rest]) == ExitCode.INCOMPLETE
    assert recorded()["unfinished"] == rest[1:]
    planting(set(rest[1:]), to_the_end=True)
    assert main([*arguments, "--only", *rest[1:]]) == ExitCode.WRONG
    assert "unfinished" not in recorded()
    assert {fault["fate"] for fault in recorded()["faults"].values()} == {"missed"}
    assert set(recorded()["controls"]) == {control.name for control in some_controls}


def test_a_record_is_shown_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    document = {"schema": 1, "sections": {SECTION: payload([line()], [PASSING])}}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["faults", "--show", str(path)]) == ExitCode.OK
    assert "| **all** | 1 | 0 / 1 | 0 | 1 |" in capsys.readouterr().out


def test_a_file_without_a_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["faults", "--show", str(tmp_path / "none.json")]) == ExitCode.USAGE
    assert "none.json: no such file" in capsys.readouterr().err
