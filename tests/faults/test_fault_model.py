from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.faults.corpus.points import delta
from loragate.faults.fates import fate_by_anyone, fate_of_fault, killers_of
from loragate.faults.model import (
    Check,
    Control,
    Edit,
    Fate,
    Fault,
    Group,
    Sighting,
)
from loragate.faults.order import Order, Recorder, Suite, read_order, read_transcript, write_order

EDIT = Edit("lorakernels.batch.metadata", "old", "new")
CASE = delta(oracles=(OracleName.REFERENCE, OracleName.EXACT))


def fault(**fields: Any) -> Fault:
    given: dict[str, Any] = {
        "name": "a-fault",
        "edit": EDIT,
        "group": Group.METADATA,
        "source": "own",
        "why": "It is wrong.",
        "killers": (OracleName.REFERENCE,),
        "cases": (CASE,),
    }
    return Fault(**(given | fields))


def seen(judge: str, verdict: Verdict, failure: Failure | None = None, said: str = "") -> Sighting:
    return Sighting(judge=judge, case="c", verdict=verdict, failure=failure, message=said)


WRONG = seen("reference", Verdict.FAIL, Failure.WRONG_ANSWER, "far off")
FINE = seen("exact", Verdict.PASS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "A Fault"}, "a name must be lower-case words joined by '-' (got 'A Fault')"),
        ({"killers": ()}, "a-fault: killers must name at least one oracle or check"),
        ({"cases": ()}, "a-fault: cases and checks must be 1 to 3 (got 0)"),
        ({"cases": (CASE,) * 4}, "a-fault: cases and checks must be 1 to 3 (got 4)"),
        ({"killers": (Check.PACKING,)}, "a-fault: killer packing is not among its checks"),
        ({"killers": (OracleName.GUARD,)}, "a-fault: killer guard judges none of its cases"),
        (
            {"killers": (OracleName.REFERENCE, OracleName.EXACT), "only": True},
            "a-fault: only goes with one killer (got 2)",
        ),
    ],
)
def test_a_fault_that_could_prove_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fault(**fields)


def test_an_edit_must_change_something() -> None:
    with pytest.raises(ValueError, match="new must differ from old"):
        Edit("lorakernels.batch.metadata", "same", "same")
    with pytest.raises(ValueError, match="old must be a piece of its text"):
        Edit("lorakernels.batch.metadata", " \n", "x")


def test_a_digest_changes_with_what_must_detect_the_fault_and_not_with_the_edit() -> None:
    moved = Edit("lorakernels.batch.other", "other text", "new")
    assert fault().digest == fault(why="Said otherwise.", edit=moved).digest
    changed = [
        fault(killers=(OracleName.EXACT,)),
        fault(cases=(replace(CASE, tokens=5),)),
        fault(only=True),
    ]
    assert fault().digest not in {other.digest for other in changed}


def test_a_fault_that_nothing_detects_has_survived() -> None:
    outcome = fate_of_fault(fault(), [seen("reference", Verdict.PASS), FINE], 1.0)
    assert (outcome.fate, outcome.killers) == (Fate.SURVIVED, ())


def test_a_survivor_says_why_its_killer_did_not_judge() -> None:
    skipped = seen("reference", Verdict.SKIP, said="no rows")
    outcome = fate_of_fault(fault(), [skipped, FINE], 1.0)
    assert outcome.message == "not detected (reference: skip, no rows)"


def test_a_fault_is_killed_when_every_killer_has_detected_it() -> None:
    outcome = fate_of_fault(fault(), [WRONG, FINE], 1.0)
    assert (outcome.fate, outcome.message) == (Fate.KILLED, "reference: far off")


def test_a_fault_that_only_others_detect_is_missed() -> None:
    other = seen("canary", Verdict.FAIL, Failure.FOREIGN_MEMORY)
    outcome = fate_of_fault(fault(), [seen("reference", Verdict.PASS), other], 1.0)
    assert outcome.fate is Fate.MISSED
    assert outcome.message == "detected by canary, not by reference"


def test_a_fault_for_one_oracle_alone_is_missed_when_another_detects_it_too() -> None:
    other = seen("exact", Verdict.FAIL, Failure.WRONG_ANSWER)
    outcome = fate_of_fault(fault(only=True), [WRONG, other], 1.0)
    assert outcome.fate is Fate.MISSED
    assert "exact as well" in outcome.message


def test_an_exception_does_not_count_as_detection_by_the_oracle_that_ran() -> None:
    thrown = seen("reference", Verdict.FAIL, Failure.EXCEPTION, "TypeError")
    assert killers_of([thrown]) == ("exception",)
    assert fate_of_fault(fault(), [thrown], 1.0).fate is Fate.MISSED
    expected = fault(killers=(Failure.EXCEPTION,))
    assert fate_of_fault(expected, [thrown], 1.0).fate is Fate.KILLED


def test_a_lack_of_memory_proves_nothing() -> None:
    full = seen("exact", Verdict.INFRA, Failure.OUT_OF_MEMORY, "out of memory")
    assert fate_of_fault(fault(), [WRONG, full], 1.0).fate is Fate.BROKEN


def test_a_control_passes_only_if_something_ran_and_nothing_failed() -> None:
    control = Control(name="a-control", why="Nothing changes.", cases=(CASE,))
    assert fate_by_anyone(control.name, [FINE], 1.0).fate is Fate.SURVIVED
    assert fate_by_anyone(control.name, [WRONG, FINE], 1.0).fate is Fate.KILLED
    skipped = [seen("exact", Verdict.SKIP, said="no rows")]
    assert fate_by_anyone(control.name, skipped, 1.0).fate is Fate.BROKEN


def test_any_failure_in_the_baseline_suite_detects_a_fault() -> None:
    thrown = seen("linear layers", Verdict.FAIL, Failure.WRONG_ANSWER)
    assert fate_by_anyone("a-fault", [thrown], 1.0).fate is Fate.KILLED
    assert fate_by_anyone("a-fault", [FINE], 1.0).fate is Fate.SURVIVED


def test_a_baseline_suite_that_could_not_run_is_broken_and_has_missed_nothing() -> None:
    broken = seen("import", Verdict.INFRA, Failure.CRASH, "ImportError")
    for sightings in ([broken], [FINE, broken], [WRONG, broken]):
        outcome = fate_by_anyone("a-fault", sightings, 1.0)
        assert (outcome.fate, outcome.message) == (Fate.BROKEN, "import: ImportError")
    assert fate_by_anyone("a-fault", [], 1.0).fate is Fate.BROKEN


def test_an_order_comes_back_as_it_was_written(tmp_path: Any) -> None:
    order = Order(
        planted="/p",
        module="lorakernels.m",
        suite=Suite.ORACLES,
        cases=(CASE,),
        checks=(Check.PACKING,),
    )
    write_order(order, tmp_path / "order.json")
    assert read_order(tmp_path / "order.json") == order


def test_a_transcript_names_the_judge_that_ran_when_the_process_died(tmp_path: Any) -> None:
    path = tmp_path / "transcript.jsonl"
    recorder = Recorder(path)
    recorder.begin("reference")
    recorder.record(WRONG)
    recorder.begin("exact")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"sighting": {"judge": "exa')
    transcript = read_transcript(path)
    assert transcript.sightings == (WRONG,)
    assert (transcript.current, transcript.finished) == ("exact", False)


def test_a_process_that_wrote_nothing_leaves_an_empty_transcript(tmp_path: Any) -> None:
    transcript = read_transcript(tmp_path / "none.jsonl")
    assert (transcript.sightings, transcript.finished) == ((), False)
