"""The engine of examples/small_engine.py passes what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragate.core.machine import Machine
from loragate.core.verdict import Verdict
from loragate.matrix.case import Case
from loragate.matrix.load import load_cases
from loragate.protocol import CheckedSubject, Trial, unsupported
from loragate.run.trial import run_trial
from loragate.subjects import find_subject

pytest.importorskip("transformers", minversion="5.23")

pytestmark = pytest.mark.usefixtures("preloaded")

EXAMPLES = Path(__file__).parents[2] / "examples"
# the first one has fp32 and more adapters than slots, the second one bf16
CASES = load_cases([EXAMPLES / "small_engine.yaml"])[:2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.dtype)
def test_the_engine_of_the_examples_passes_every_oracle(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its process finds it there, too
    monkeypatch.syspath_prepend(EXAMPLES)
    machine = Machine("cpu", "test", None, 1, 0)
    subject = CheckedSubject(find_subject("small_engine:SmallSubject"))
    have = subject.capabilities(machine)
    assert not isinstance(have, str)
    assert unsupported(case, have) is None
    found = run_trial(Trial(case, subject, have, machine, seed=3))
    assert [judgement.oracle for judgement in found] == list(case.oracles)
    assert {judgement.verdict for judgement in found} == {Verdict.PASS}, found
