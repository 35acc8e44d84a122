"""transformers with PEFT as an engine, in cases that are too large for the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName, Verdict
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Active, Ends, Model, Speculation, Weights
from loragate.protocol import CheckedSubject, Trial, unsupported
from loragate.run.trial import run_trial
from loragate.subjects.transformers import subject as module
from loragate.subjects.transformers.subject import TransformersSubject

CPU = Machine("cpu", "test", None, 1, 0)
SUBJECT = TransformersSubject()


def case_of(**axes: Any) -> Case:
    oracles = (OracleName.TOKENS, OracleName.ENGINE_PROPERTIES, OracleName.LIVENESS)
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32, "oracles": oracles}
    # where other processes keep all cores busy, bf16 takes long without kernels for it
    return Case(**{**fixed, "timeout_s": 240.0, **axes})


def judged(case: Case) -> dict[OracleName, Any]:
    have = SUBJECT.capabilities(CPU)
    assert not isinstance(have, str)
    assert unsupported(case, have) is None
    trial = Trial(case, CheckedSubject(SUBJECT), have, CPU, seed=3)
    return {judgement.oracle: judgement for judgement in run_trial(trial)}


def test_a_model_with_delta_nets_is_served_and_judged_up_to_tokens_that_end_answers() -> None:
    found = judged(case_of(model=Model.HYBRID, active=Active.BEYOND_SLOTS, ends=Ends.STOP))
    assert found[OracleName.TOKENS].verdict is Verdict.PASS, found
    assert found[OracleName.ENGINE_PROPERTIES].verdict is Verdict.PASS, found
    # it has no kernels of adapters that it could count
    assert found[OracleName.LIVENESS].verdict is Verdict.SKIP


def test_drafts_of_a_model_are_accepted_and_rejected_in_a_mixture_of_experts() -> None:
    found = judged(case_of(model=Model.MOE, speculation=Speculation.DRAFT_MODEL))
    assert {judgement.verdict for judgement in found.values()} == {Verdict.PASS}, found
    metrics = found[OracleName.LIVENESS].metrics
    # 18 requests of 83 tokens, of which each gets one without a draft at least
    assert 0 < metrics["drafts accepted"] <= 65
    assert metrics["drafts rejected"] > 0


@pytest.mark.parametrize(("model", "dtype"), [(Model.MOE, Dtype.FP32), (Model.DENSE, Dtype.BF16)])
def test_random_weights_are_served_and_judged_without_a_near_tie(
    model: Model, dtype: Dtype
) -> None:
    axes = {"weights": Weights.RANDOM, "active": Active.BEYOND_SLOTS, "dtype": dtype}
    found = judged(case_of(model=model, speculation=Speculation.DRAFT_MODEL, **axes))
    assert {judgement.verdict for judgement in found.values()} == {Verdict.PASS}, found
    assert found[OracleName.TOKENS].metrics["near_ties"] == 0
    assert min(found[OracleName.LIVENESS].metrics.values()) > 0


def test_what_it_cannot_serve_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    have = SUBJECT.capabilities(CPU)
    assert not isinstance(have, str)
    drafted = case_of(model=Model.HYBRID, speculation=Speculation.NGRAM)
    assert "a state that cannot be taken back" in str(unsupported(drafted, have))
    eagle = case_of(speculation=Speculation.EAGLE)
    assert unsupported(eagle, have) == "speculation eagle is not supported"
    # a PEFT that has no adapters of single experts
    known = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: "." not in name and known(name))
    old = SUBJECT.capabilities(CPU)
    assert not isinstance(old, str)
    assert unsupported(case_of(model=Model.MOE), old) == "model moe is not supported"
    assert unsupported(case_of(), old) is None
