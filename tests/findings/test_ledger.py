from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import comb
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
    exceeded_finding,
    known_finding,
    observe_cases,
    verdict_of,
)
from loragate.findings.load import LedgerError, ledger_path, load_ledger
from loragate.findings.pattern import CasePattern, Limit, Place
from loragate.findings.rate import Rate, least_rate
from loragate.findings.vllm_probes import PROBES
from loragate.matrix.ids import run_id
from loragate.matrix.load import load_cases
from loragate.subjects.registry import SUBJECTS

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


LIMITED = CasePattern(
    "vllm.*",
    OracleName.REFERENCE,
    (Failure.WRONG_ANSWER, Failure.CUDA_STICKY),
    (Limit("wrong_rows", 33), Limit("ratio", 8)),
    (Place("slot", -1),),
)


@pytest.mark.parametrize(
    ("changes", "excess"),
    [
        ({}, ""),
        ({"metrics": {"wrong_rows": 33.0, "ratio": 8.0}}, ""),
        (
            {"metrics": {"wrong_rows": 34.0, "ratio": 9.5}},
            "wrong_rows at most 33, not 34; ratio at most 8, not 9.5",
        ),
        ({"metrics": {"wrong_rows": 1.0, "ratio": math.nan}}, "ratio at most 8, not nan"),
        ({"metrics": {"ratio": 2.0}}, "wrong_rows at most 33, and it is not reported"),
        ({"where": {"slot": 2}}, "slot -1, not 2"),
        ({"where": {}}, "slot -1, not unknown"),
        # a process that ends measures nothing
        ({"failure": Failure.CUDA_STICKY, "metrics": {}, "where": {}}, ""),
    ],
)
def test_a_failure_is_listed_up_to_its_size_and_at_its_place(
    changes: dict[str, Any], excess: str
) -> None:
    fields: dict[str, Any] = {
        "failure": Failure.WRONG_ANSWER,
        "metrics": {"wrong_rows": 2.0, "ratio": 3.0},
        "where": {"slot": -1, "token": 7},
    }
    judgement = Judgement(OracleName.REFERENCE, Verdict.FAIL, **(fields | changes))
    listed = [finding(probe=None, case=LIMITED)]
    assert LIMITED.shows(RUN, judgement) is (not excess)
    assert LIMITED.excess(RUN, judgement) == excess
    beyond = exceeded_finding(listed, "0.26.0", RUN, judgement)
    assert beyond == ((listed[0], excess) if excess else None)


def test_a_failure_of_another_kind_does_not_exceed_a_finding() -> None:
    listed = [finding(probe=None, case=LIMITED)]
    other = Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.EXCEPTION)
    assert known_finding(listed, "0.26.0", RUN, other) is None
    assert exceeded_finding(listed, "0.26.0", RUN, other) is None
    assert exceeded_finding(listed, "0.27.0", RUN, WRONG) is None


def test_a_draw_shows_a_finding_if_one_of_its_repeats_does() -> None:
    repeats = [Judged(RUN, 5, WRONG), Judged(RUN, 5, RIGHT)]
    for order in (repeats, repeats[::-1]):
        observed = observe_cases([rated(None)], order)["an-item"]
        assert (observed.seen, observed.text) == (
            Seen.REPRODUCED,
            f"1 of 1 draws, first {RUN}",
        )


def rated(seen: Rate | None, probe: str | None = None) -> Finding:
    return finding(probe=probe, case=replace(CASE, seen=seen))


@pytest.mark.parametrize(
    ("entry", "unseen", "seen", "text"),
    [
        (rated(None), 1, Seen.ABSENT, "none of 1 draws shows it"),
        (rated(Rate(9, 9)), 1, Seen.ABSENT, "none of 1 draws shows it"),
        (rated(Rate(4, 20)), 154, Seen.UNSEEN, "none of 154 draws shows it, which 4 of 20 draws "),
        (rated(Rate(4, 20)), 155, Seen.ABSENT, "none of 155 draws shows it, which 4 of 20 draws "),
        (rated(None, "p"), 500, Seen.UNSEEN, "none of 500 draws shows it; probe p decides"),
    ],
)
def test_a_finding_is_gone_once_the_draws_without_it_exclude_its_rate(
    entry: Finding, unseen: int, seen: Seen, text: str
) -> None:
    judged = [Judged(f"vllm.dense_delta.{draw % 7}", draw, RIGHT) for draw in range(unseen)]
    # a repeat of a draw is no further draw
    observed = observe_cases([entry], [*judged, *judged])["an-item"]
    assert (observed.seen, observed.text.startswith(text)) == (seen, True), observed.text
    shown = observe_cases([entry], [*judged, Judged(RUN, 5, WRONG)])["an-item"]
    assert shown == Observation(Seen.REPRODUCED, f"1 of {unseen + 1} draws, first {RUN}")


def test_a_finding_that_was_not_seen_and_may_still_be_there_fails_nothing() -> None:
    assert state_of(Seen.UNSEEN, "0.26.0") == (State.UNSEEN, Verdict.SKIP)


@pytest.mark.parametrize("rate", [Rate(1, 20), Rate(4, 20), Rate(19, 20), Rate(300, 1500)])
def test_the_least_rate_gives_as_many_draws_with_a_chance_of_one_percent(rate: Rate) -> None:
    least = least_rate(rate)
    assert 0 < least < rate.draws / rate.of
    # the other tail, of exact numbers
    p = Fraction(least)
    fewer = sum(comb(rate.of, k) * p**k * (1 - p) ** (rate.of - k) for k in range(rate.draws))
    assert float(1 - fewer) == pytest.approx(0.01, rel=1e-6)


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


def test_an_entry_needs_a_way_to_reproduce_it(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("    probe: one\n", ""))
    with pytest.raises(LedgerError, match=r":3: findings\[0\]: allowed: a probe or a case"):
        load_ledger(file)


@pytest.mark.parametrize(
    "pattern", ["*", "vllm*", "vllm?dense_delta", "vllm_lorakernels.*", "dense_delta.vllm.*"]
)
def test_an_entry_names_only_cases_of_its_own_subject(tmp_path: Path, pattern: str) -> None:
    case = f"    case: {{run: '{pattern}', oracle: reference, failure: hang}}\n"
    file = write(tmp_path, GOOD.replace("    probe: one\n", case))
    with pytest.raises(LedgerError) as error:
        load_ledger(file)
    allowed = "allowed: run ids of this subject, 'vllm.*'"
    assert f":10: findings[0].case.run: given '{pattern}'; {allowed}" in str(error.value)


def test_an_entry_about_several_subjects_has_the_same_cases_of_each() -> None:
    both = finding(probe=None, case=replace(CASE, seen=Rate(4, 20)), also=("fork",))
    assert both.subjects == ("vllm", "fork")
    own, other = both.of("vllm"), both.of("fork")
    assert (own.case, own.also, other.also) == (both.case, (), ())
    assert (other.subject, other.versions) == ("fork", both.versions)
    assert other.case == replace(CASE, run="fork.dense_delta.*", seen=Rate(4, 20))
    assert known_finding([other], "0.26.0", RUN, WRONG) is None
    assert known_finding([other], "0.26.0", RUN.replace("vllm", "fork"), WRONG) is other


def test_the_shipped_ledger_names_subjects_that_exist() -> None:
    findings = load_ledger(ledger_path())
    assert {name for entry in findings for name in entry.subjects} <= SUBJECTS.keys()
    assert any(entry.also for entry in findings)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (GOOD + "    also: [fork]\n", "also: allowed: with a case, which these subjects fail"),
        ("also: [vllm]", "also: given ['vllm']; allowed: each other subject than vllm once"),
        ("also: [a, a]", "also: given ['a', 'a']; allowed: each other subject than vllm once"),
        ("also: fork", "also: given 'fork'; allowed: a list of subjects"),
    ],
)
def test_further_subjects_that_are_none_are_reported(
    tmp_path: Path, entry: str, message: str
) -> None:
    if entry.startswith("also"):
        entry = f"{CASE_ENTRY.replace('MORE', 'size: {err: 8}')}    {entry}\n"
    with pytest.raises(LedgerError) as error:
        load_ledger(write(tmp_path, entry))
    assert f"findings[0].{message}" in str(error.value)


CASE_ENTRY = GOOD.replace(
    "    probe: one\n",
    "    case: {run: vllm.x, oracle: reference, failure: [cuda_sticky, wrong_answer], MORE}\n",
)


def test_a_listed_size_place_and_rate_are_read(tmp_path: Path) -> None:
    more = "size: {wrong_rows: 33, err: 8}, where: {slot: -1}, seen: {draws: 4, of: 20}"
    (entry,) = load_ledger(write(tmp_path, CASE_ENTRY.replace("MORE", more)))
    assert entry.case is not None
    assert entry.case.size == (Limit("wrong_rows", 33), Limit("err", 8))
    assert (entry.case.where, entry.case.seen) == ((Place("slot", -1),), Rate(4, 20))
    assert entry.case.extent == "wrong_rows at most 33, err at most 8, slot -1"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("where: {slot: 1}", "case: has no size; a failure wrong_answer needs the largest values"),
        ("size: {}", "case: has no size; a failure wrong_answer needs the largest values"),
        ("size: {err: .inf}", "case.size: given err: inf; allowed: a metric with its largest"),
        ("size: {err: .nan}", "case.size: given err: nan; allowed: a metric with its largest"),
        ("size: {err: -1}", "case.size: given err: -1; allowed: a metric with its largest value"),
        ("size: {err: much}", "case.size: given err: much; allowed: a metric with its largest"),
        ("size: 8", "case.size: given 8; allowed: metrics with their largest values"),
        ("size: {err: 8}, where: {slot: 1.5}", "case.where: given slot: 1.5; allowed: an axis"),
        ("size: {err: 8}, seen: {draws: 0, of: 20}", "case.seen.draws: given 0; allowed: a number"),
        ("size: {err: 8}, seen: {draws: 4}", "case.seen.of: is missing; allowed: a number of"),
        ("size: {err: 8}, seen: {draws: 21, of: 20}", "case.seen.draws: given 21 of 20 draws"),
    ],
)
def test_a_finding_about_a_wrong_answer_needs_a_size_and_a_rate_that_is_one(
    tmp_path: Path, more: str, message: str
) -> None:
    with pytest.raises(LedgerError) as error:
        load_ledger(write(tmp_path, CASE_ENTRY.replace("MORE", more)))
    assert f":10: findings[0].{message}" in str(error.value)


def test_a_rate_is_refused_beside_a_probe_which_decides(tmp_path: Path) -> None:
    text = CASE_ENTRY.replace("MORE", "size: {err: 8}, seen: {draws: 4, of: 20}")
    with pytest.raises(LedgerError, match=r"case\.seen: allowed: only without a probe"):
        load_ledger(write(tmp_path, text + "    probe: one\n"))


def test_the_cases_of_the_shipped_ledger_exist_and_have_the_oracle_that_is_named() -> None:
    shipped = {
        run_id(subject, case): case
        for case in load_cases(sorted((ledger_path().parents[1]).glob("*.yaml")))
        for subject in ("vllm", "vllm_lorakernels")
    }
    entries = [
        finding.of(subject).case
        for finding in load_ledger(ledger_path())
        if finding.case
        for subject in finding.subjects
    ]
    assert entries
    for entry in filter(None, entries):
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
