from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from loragate.commands import findings as cli
from loragate.core.verdict import EXIT_CODES, ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.findings.ledger import (
    Finding,
    Judged,
    Kind,
    Observation,
    Seen,
    State,
    audit,
    known_finding,
    observe_cases,
    verdict_of,
)
from loragate.findings.load import LedgerError, ledger_path, load_ledger
from loragate.findings.pattern import CasePattern
from loragate.findings.vllm_probes import PROBES
from loragate.matrix.ids import run_id
from loragate.matrix.load import load_cases

RUN = "vllm.dense_delta.dtype-bf16.in-64"
WRONG = Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.WRONG_ANSWER)
RIGHT = Judgement(OracleName.REFERENCE, Verdict.PASS)
CASE = CasePattern("vllm.dense_delta.*", OracleName.REFERENCE, (Failure.WRONG_ANSWER,))


def finding(**changes: Any) -> Finding:
    fields: dict[str, Any] = {
        "id": "an-item",
        "subject": "vllm",
        "versions": ">=0.26,<0.27",
        "kind": Kind.DEFECT,
        "title": "An item",
        "statement": "It is so.",
        "evidence": "1 is 2",
        "seen_on": "0.26.0, interpreter",
        "probe": "an-item",
    }
    return Finding(**(fields | changes))


def case_finding() -> Finding:
    return finding(probe=None, case=CASE)


def state_of(seen: Seen, version: str) -> tuple[State, Verdict]:
    lines = audit([finding()], version, {"an-item": Observation(seen, "")})
    return lines[0].state, verdict_of(lines)


def test_an_entry_that_reproduces_on_a_version_of_its_range_is_known_and_passes() -> None:
    assert state_of(Seen.REPRODUCED, "0.26.1") == (State.KNOWN, Verdict.PASS)


def test_an_entry_that_stopped_reproducing_on_a_version_of_its_range_fails() -> None:
    assert state_of(Seen.ABSENT, "0.26.1") == (State.STALE, Verdict.FAIL)


@pytest.mark.parametrize("version", ["0.27.0", "0.25.1", "unknown"])
def test_an_entry_says_nothing_about_versions_outside_of_its_range(version: str) -> None:
    for seen in (Seen.ABSENT, Seen.REPRODUCED):
        assert state_of(seen, version) == (State.OUT_OF_RANGE, Verdict.SKIP)


def test_a_ledger_about_other_versions_tried_nothing_and_says_so() -> None:
    newer = finding(id="newer", versions=">=0.27", probe="newer")
    seen = Observation(Seen.ABSENT, "no")
    lines = audit([finding(), newer], "0.28.0", {"an-item": seen, "newer": seen})
    assert verdict_of(lines) is Verdict.FAIL
    assert cli.payload(lines, {})["executed"] == 1
    assert "nothing was tried" not in cli.render("0.28.0", lines, {})
    assert EXIT_CODES[verdict_of(lines[:1])] is ExitCode.INCOMPLETE
    assert cli.payload(lines[:1], {})["executed"] == 0
    assert cli.render("0.28.0", lines[:1], {}).splitlines()[-1].startswith("nothing was tried: ")


def test_a_prerelease_of_the_range_is_in_the_range() -> None:
    assert finding().covers("0.26.1rc1")
    assert finding().covers("0.26.1.dev12+g1234567")


def test_a_broken_attempt_is_no_evidence_and_does_not_pass() -> None:
    assert state_of(Seen.BROKEN, "0.26.0") == (State.BROKEN, Verdict.INFRA)


def test_what_cannot_be_tried_here_costs_nothing_as_long_as_something_was_tried() -> None:
    findings = [finding(), finding(id="other", probe="other")]
    here, elsewhere = Observation(Seen.REPRODUCED, ""), Observation(Seen.NOT_TRIED, "needs a GPU")
    lines = audit(findings, "0.26.0", {"an-item": here, "other": elsewhere})
    assert [line.state for line in lines] == [State.KNOWN, State.NOT_TRIED]
    assert verdict_of(lines) is Verdict.PASS
    assert verdict_of(lines[1:]) is Verdict.SKIP


def test_a_failing_case_that_is_listed_is_known_and_any_other_failure_is_not() -> None:
    listed = [case_finding()]
    assert known_finding(listed, "0.26.0", RUN, WRONG) is listed[0]
    assert known_finding(listed, "0.27.0", RUN, WRONG) is None
    assert known_finding(listed, "0.26.0", "torch.dense_delta.in-64", WRONG) is None
    for other in (
        RIGHT,
        Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.HANG),
        Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER),
    ):
        assert known_finding(listed, "0.26.0", RUN, other) is None


@pytest.mark.parametrize(
    ("judged", "seen"),
    [
        ([(RUN, RIGHT), (RUN + "0", WRONG)], Seen.REPRODUCED),
        ([(RUN, RIGHT)], Seen.ABSENT),
        ([(RUN, Judgement(OracleName.REFERENCE, Verdict.SKIP))], Seen.NOT_TRIED),
        ([("torch.dense_delta.in-64", WRONG)], Seen.NOT_TRIED),
        # it failed otherwise, which may hide the listed failure
        (
            [(RUN, Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.EXCEPTION))],
            Seen.NOT_TRIED,
        ),
    ],
)
def test_cases_show_an_entry_only_if_they_were_judged(
    judged: list[tuple[str, Judgement]], seen: Seen
) -> None:
    found = observe_cases([case_finding()], [Judged(name, 0, one) for name, one in judged])
    assert found["an-item"].seen is seen


def test_one_cause_may_show_as_any_of_the_kinds_that_are_listed() -> None:
    kinds = (Failure.WRONG_ANSWER, Failure.CUDA_STICKY)
    case = CasePattern("vllm.*", OracleName.REFERENCE, kinds)
    for kind in Failure:
        judgement = Judgement(OracleName.REFERENCE, Verdict.FAIL, kind)
        assert case.shows(RUN, judgement) is (kind in kinds)


def write(path: Path, text: str) -> Path:
    file = path / "vllm.yaml"
    file.write_text(text)
    return file


GOOD = """\
subject: vllm
findings:
  - id: one
    title: One
    kind: hazard
    versions: ">=0.26"
    statement: It is so.
    evidence: 1 is 2
    seen_on: 0.26.0, interpreter
    probe: one
"""


def test_all_problems_of_a_ledger_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    bad = GOOD.replace("hazard", "hasard").replace(">=0.26", "0.26 or so").replace("One", "''")
    file = write(tmp_path, bad + "  - {id: two}\n")
    with pytest.raises(LedgerError) as error:
        load_ledger(file)
    text = str(error.value)
    assert f"{file}:5: findings[0].kind: given 'hasard'" in text
    assert "nearest: hazard" in text
    assert f"{file}:6: findings[0].versions: given '0.26 or so'; allowed: a range" in text
    assert f"{file}:11: findings[1].kind: is missing; allowed: defect, hazard" in text


def test_an_entry_needs_exactly_one_way_to_reproduce_it(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("    probe: one\n", ""))
    with pytest.raises(LedgerError, match=r":3: findings\[0\]: allowed: exactly one of probe and"):
        load_ledger(file)


def test_an_entry_names_only_cases_of_its_own_subject(tmp_path: Path) -> None:
    case = "    case: {run: '*', oracle: reference, failure: wrong_answer}\n"
    file = write(tmp_path, GOOD.replace("    probe: one\n", case))
    with pytest.raises(LedgerError, match=r":10: .*given '\*'; allowed: .*'vllm\.\*'"):
        load_ledger(file)


def test_the_cases_of_the_shipped_ledger_exist_and_have_the_oracle_that_is_named() -> None:
    shipped = {
        run_id("vllm", case): case
        for case in load_cases(sorted((ledger_path().parents[1]).glob("*.yaml")))
    }
    entries = [finding.case for finding in load_ledger(ledger_path()) if finding.case]
    assert entries
    for entry in entries:
        named = [case for name, case in shipped.items() if fnmatchcase(name, entry.run)]
        assert named, entry.run
        assert all(entry.oracle in case.oracles for case in named)


def test_a_listed_probe_that_cannot_be_tried_here_is_counted_and_named() -> None:
    findings = [finding(), finding(id="far", probe="far"), finding(id="x", probe=None, case=CASE)]
    observed = {
        "an-item": Observation(Seen.REPRODUCED, ""),
        "far": Observation(Seen.NOT_TRIED, "needs a GPU"),
        "x": Observation(Seen.NOT_TRIED, "its cases are judged by the gate"),
    }
    lines = audit(findings, "0.26.0", observed)
    assert "not run here far: not tried: needs a GPU" in cli.render("0.26.0", lines, {})
    note = "vllm 0.26.0: 2 listed findings with a probe (1 known, 1 not run here); far"
    assert cli.probes_note("0.26.0", lines) == note


def test_an_id_occurs_once(tmp_path: Path) -> None:
    entry = GOOD.split("findings:\n")[1]
    with pytest.raises(LedgerError, match=r":11: findings\[1\].id: id 'one' is used again"):
        load_ledger(write(tmp_path, GOOD + entry))


def test_a_probe_that_does_not_exist_is_named_with_the_nearest_that_does() -> None:
    complaint = cli.check_probes([finding(probe="mapping-tail-stail")], PROBES)
    assert complaint is not None
    assert complaint.startswith("an-item: given probe 'mapping-tail-stail'; allowed: ")
    assert complaint.endswith("nearest: mapping-tail-stale")


def test_the_shipped_ledger_names_probes_that_exist() -> None:
    findings = load_ledger(ledger_path())
    assert findings
    assert cli.check_probes(findings, PROBES) is None


def test_a_suspicion_without_an_entry_is_shown_and_not_judged() -> None:
    tried = {"an-item": Observation(Seen.REPRODUCED, ""), "x": Observation(Seen.ABSENT, "no")}
    lines = audit([finding()], "0.26.0", tried)
    open_ones = cli.unlisted([finding()], tried)
    text = cli.render("0.26.0", lines, open_ones)
    assert text.splitlines()[0] == "vllm 0.26.0: 1 listed findings (1 known)"
    assert text.splitlines()[2] == "unlisted     x: absent: no"
    assert cli.payload(lines, open_ones)["unlisted"] == {"x": {"seen": "absent", "text": "no"}}
