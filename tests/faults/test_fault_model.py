from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.faults.corpus.killers import as_entries, as_text
from loragate.faults.fates import fate_by_anyone, fate_of_fault, killers_of
from loragate.faults.model import (
    Control,
    Edit,
    Fate,
    Fault,
    GateItem,
    Group,
    Killer,
    Needs,
    Part,
    Sighting,
)
from loragate.faults.order import (
    Begun,
    Order,
    Recorder,
    Suite,
    read_order,
    read_transcript,
    write_order,
)
from loragate.matrix.case import Case, Dtype, Site

EDIT = Edit("lorakernels.batch.metadata", "old", "new")
CASE = GateItem(Part.CASE, "a.case")
TEST = GateItem(Part.HOST_TEST, "tests/test_a.py::test_a")
REFERENCE = Killer(CASE, OracleName.REFERENCE)


def fault(**fields: Any) -> Fault:
    given: dict[str, Any] = {
        "name": "a-fault",
        "edit": EDIT,
        "group": Group.METADATA,
        "source": "own",
        "why": "It is wrong.",
        "killers": (REFERENCE,),
    }
    return Fault(**(given | fields))


def seen(judge: str, verdict: Verdict, failure: Failure | None = None, said: str = "") -> Sighting:
    return Sighting(
        judge=judge, case=CASE.id, verdict=verdict, failure=failure, message=said, part=Part.CASE
    )


WRONG = seen("reference", Verdict.FAIL, Failure.WRONG_ANSWER, "far off")
FINE = seen("exact", Verdict.PASS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "A Fault"}, "a name must be lower-case words joined by '-' (got 'A Fault')"),
        (
            {"killers": (REFERENCE, Killer(TEST)), "only": True},
            "a-fault: only goes with one killer (got 2)",
        ),
    ],
)
def test_a_fault_that_could_prove_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fault(**fields)


def test_a_case_detects_a_fault_with_an_oracle_and_a_host_test_without_one() -> None:
    with pytest.raises(ValueError, match="a killer that is a case must name an oracle"):
        Killer(CASE)
    with pytest.raises(ValueError, match="a killer that is a host test cannot name an oracle"):
        Killer(TEST, OracleName.EXACT)


def test_an_edit_must_change_something() -> None:
    with pytest.raises(ValueError, match="new must differ from old"):
        Edit("lorakernels.batch.metadata", "same", "same")
    with pytest.raises(ValueError, match="old must be a piece of its text"):
        Edit("lorakernels.batch.metadata", " \n", "x")


def test_a_digest_changes_with_what_must_detect_the_fault_and_not_with_the_edit() -> None:
    moved = Edit("lorakernels.batch.other", "other text", "new")
    assert fault().digest == fault(why="Said otherwise.", edit=moved).digest
    changed = [
        fault(killers=(Killer(CASE, OracleName.EXACT),)),
        fault(killers=(Killer(replace(CASE, id="another.case"), OracleName.REFERENCE),)),
        fault(shown=(TEST,)),
        fault(only=True),
        fault(needs=Needs.GPU),
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


def test_another_case_than_the_one_that_is_named_does_not_count() -> None:
    elsewhere = replace(WRONG, case="another.case")
    outcome = fate_of_fault(fault(), [elsewhere], 1.0)
    assert (outcome.fate, outcome.killers) == (Fate.MISSED, ("reference",))


def test_a_fault_is_killed_by_the_host_test_that_is_named() -> None:
    failed = Sighting(
        judge=TEST.id,
        case="",
        verdict=Verdict.FAIL,
        failure=Failure.WRONG_ANSWER,
        part=Part.HOST_TEST,
    )
    named = fault(killers=(Killer(TEST),))
    assert fate_of_fault(named, [failed], 1.0).fate is Fate.KILLED
    passed = replace(failed, verdict=Verdict.PASS, failure=None)
    assert fate_of_fault(named, [passed], 1.0).fate is Fate.SURVIVED


def test_a_fault_for_one_oracle_alone_is_missed_when_another_detects_it_too() -> None:
    other = seen("exact", Verdict.FAIL, Failure.WRONG_ANSWER)
    outcome = fate_of_fault(fault(only=True), [WRONG, other], 1.0)
    assert outcome.fate is Fate.MISSED
    assert "exact as well" in outcome.message


def test_an_exception_does_not_count_as_detection_by_the_oracle_that_ran() -> None:
    thrown = seen("reference", Verdict.FAIL, Failure.EXCEPTION, "TypeError")
    assert killers_of([thrown]) == ("exception",)
    assert fate_of_fault(fault(), [thrown], 1.0).fate is Fate.MISSED
    expected = fault(killers=(Killer(CASE, Failure.EXCEPTION),))
    assert fate_of_fault(expected, [thrown], 1.0).fate is Fate.KILLED


@pytest.mark.parametrize(
    "failure",
    [
        Failure.BROKEN_PROTOCOL,
        Failure.EXCEPTION,
        Failure.HANG,
        Failure.CRASH,
        Failure.CUDA_STICKY,
        Failure.OUT_OF_MEMORY,
    ],
)
def test_how_a_process_ends_is_no_detection_by_the_oracle_that_happened_to_run(
    failure: Failure,
) -> None:
    ended = seen("reference", Verdict.FAIL, failure)
    assert killers_of([ended]) == (failure.value,)
    assert fate_of_fault(fault(), [ended], 1.0).fate is Fate.MISSED


def test_a_lack_of_memory_proves_nothing() -> None:
    full = seen("exact", Verdict.INFRA, Failure.OUT_OF_MEMORY, "out of memory")
    assert fate_of_fault(fault(), [WRONG, full], 1.0).fate is Fate.BROKEN


def test_a_control_passes_only_if_something_ran_and_nothing_failed() -> None:
    control = Control(name="a-control", why="Nothing changes.", items=(CASE,))
    assert fate_by_anyone(control.name, [FINE], 1.0).fate is Fate.SURVIVED
    assert fate_by_anyone(control.name, [WRONG, FINE], 1.0).fate is Fate.KILLED
    skipped = [seen("exact", Verdict.SKIP, said="no rows")]
    assert fate_by_anyone(control.name, skipped, 1.0).fate is Fate.BROKEN
    undecided = seen("exact", Verdict.INCONCLUSIVE, said="no call was seen")
    outcome = fate_by_anyone(control.name, [FINE, undecided], 1.0)
    assert (outcome.fate, outcome.message) == (Fate.BROKEN, "exact: no call was seen")
    assert fate_by_anyone(control.name, [WRONG, undecided], 1.0).fate is Fate.KILLED


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
    case = Case(
        site=Site.DENSE_DELTA,
        tokens=2,
        in_features=4,
        slices=(4,),
        rank=1,
        slots=1,
        dtype=Dtype.BF16,
        oracles=(OracleName.REFERENCE,),
    )
    order = Order(
        module="lorakernels.m", suite=Suite.GATE, cases=(case,), tests=(TEST.id,), launches=("l",)
    )
    write_order(order, tmp_path / "order.json")
    assert read_order(tmp_path / "order.json") == order


def test_a_transcript_names_the_judge_that_ran_when_the_process_died(tmp_path: Any) -> None:
    path = tmp_path / "transcript.jsonl"
    recorder = Recorder(path)
    recorder.begin(Begun("reference", CASE.id, Part.CASE))
    recorder.record(WRONG)
    exact = Begun("exact", CASE.id, Part.CASE)
    recorder.begin(exact)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"sighting": {"judge": "exa')
    transcript = read_transcript(path)
    assert transcript.sightings == (WRONG,)
    assert (transcript.current, transcript.finished) == (exact, False)


def test_a_process_that_wrote_nothing_leaves_an_empty_transcript(tmp_path: Any) -> None:
    transcript = read_transcript(tmp_path / "none.jsonl")
    assert (transcript.sightings, transcript.finished) == ((), False)


def test_killers_are_written_as_the_file_has_them() -> None:
    killers = (REFERENCE, Killer(CASE, OracleName.EXACT), Killer(TEST))
    assert as_text({"a-fault": as_entries(killers)}).splitlines() == [
        "a-fault:",
        "- case: a.case",
        "  by: [reference, exact]",
        "- {test: 'tests/test_a.py::test_a'}",
    ]
