"""How the listed cases of the ledger reach a run and a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.model import CaseFinished, KnownFinding, RunStarted
from loragate.findings import load
from loragate.findings.ledger import Finding, Kind
from loragate.findings.load import ledger_path, load_ledger
from loragate.findings.pattern import CasePattern
from loragate.matrix.case import Tier
from loragate.matrix.load import load_cases
from loragate.matrix.selection import Selection
from loragate.plugin import collection
from loragate.plugin.judging import _conclude
from loragate.run import opening, planning
from loragate.run.opening import RunRequest, opening_events

MATRIX = Path(__file__).parents[1] / "plugin" / "misbehaving" / "long_sleep.yaml"
RUN = "vllm.dense_delta.rank-4"
LISTED = Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.WRONG_ANSWER, "row 3 is zero")
OTHER = Judgement(OracleName.CANARY, Verdict.FAIL, Failure.FOREIGN_MEMORY, "written behind")
ENTRY = Finding(
    id="far-rows",
    subject="vllm",
    versions=">=0.26,<0.27",
    kind=Kind.DEFECT,
    title="Far rows are lost",
    statement="It is so.",
    evidence="1 is 2",
    seen_on="0.26.0, H200",
    case=CasePattern(RUN, OracleName.REFERENCE, (Failure.WRONG_ANSWER,)),
)


@pytest.mark.parametrize(
    ("found", "version"), [({"vllm": "0.26.0", "torch": "2.11.0"}, "0.26.0"), ({}, "")]
)
def test_a_run_records_what_is_listed_about_cases_of_its_subjects(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], version: str
) -> None:
    monkeypatch.setattr(opening, "versions", lambda: found)
    entries = [finding for finding in load_ledger(ledger_path()) if finding.case]
    assert known_of("torch") == []
    assert known_of("torch", "vllm") == [
        KnownFinding(finding=f.of("vllm"), version=version) for f in entries
    ]
    # the versions are those of vLLM, which the other subject contains
    also = [f.of("vllm_lorakernels") for f in entries if f.also]
    assert known_of("vllm_lorakernels") == [KnownFinding(finding=f, version=version) for f in also]


def test_outside_of_the_checkout_no_finding_is_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "ledger_path", lambda: tmp_path / "none.yaml")
    assert known_of("vllm") == []


def test_a_plan_and_a_session_run_a_case_that_loses_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pattern = CasePattern("torch.*", OracleName.REFERENCE, (Failure.CUDA_STICKY,))
    listed = replace(ENTRY, subject="torch", case=pattern)
    selection = Selection(matrix=(MATRIX,), subjects=("torch",), tier=Tier.SMOKE, draws=(3, 4))
    config: Any = SimpleNamespace(stash=pytest.Stash(), option=None)
    monkeypatch.setattr(collection, "all_cases", lambda config: load_cases((MATRIX,)))
    for findings, draws in (((), [3, 4] * 2), ((listed,), [3] * 2)):
        for module in (planning, collection):
            monkeypatch.setattr(module, "own_findings", lambda found=findings: found)
        config.stash = pytest.Stash()
        made, _ = planning.plan_selection(selection)
        sessions = collection.selected_trials(config, selection)
        assert [run.draw for run in made.planned] == [run.draw for run in sessions] == draws
        start = next(opening_events(request_of(selection)))
        assert isinstance(start, RunStarted)
        assert bool(start.once) == bool(findings)


@pytest.mark.parametrize(
    ("judgements", "version", "outcome", "message"),
    [
        ((LISTED,), "0.26.0", pytest.xfail.Exception, "known: far-rows"),
        ((LISTED, OTHER), "0.26.0", pytest.fail.Exception, "written behind"),
        ((LISTED,), "0.27.0", pytest.fail.Exception, "row 3 is zero"),
    ],
)
def test_the_test_of_a_case_fails_as_expected_only_if_it_fails_as_listed(
    judgements: tuple[Judgement, ...], version: str, outcome: type[Exception], message: str
) -> None:
    case = CaseFinished(
        run_id=RUN,
        subject="vllm",
        site="dense_delta",
        draw=0,
        seed=7,
        worker="main",
        verdict=Verdict.FAIL,
        judgements=judgements,
        duration_s=0.1,
        replay=f"loragate replay {RUN}",
    )
    item: Any = SimpleNamespace(user_properties=[])
    with pytest.raises(outcome, match=message):
        _conclude(case, item, (KnownFinding(finding=ENTRY, version=version),))


def known_of(*subjects: str) -> list[KnownFinding]:
    selection = Selection(matrix=(MATRIX,), subjects=subjects, tier=Tier.SMOKE)
    events = opening_events(request_of(selection))
    return [event for event in events if isinstance(event, KnownFinding)]


def request_of(selection: Selection) -> RunRequest:
    return RunRequest(run="r", selection=selection, leg="x", legs=("x",))
