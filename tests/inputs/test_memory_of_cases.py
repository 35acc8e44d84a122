"""The estimate of a case's device memory is above what its oracles take, and not far above."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.core.machine import select_interpreter
from loragate.core.verdict import OracleName, Verdict
from loragate.inputs import pieces
from loragate.matrix import footprint
from loragate.matrix.case import Case
from loragate.protocol import Trial
from loragate.run.trial import load_subject, run_trial

from .live_bytes import LARGE, LiveBytes

select_interpreter()
ORACLES = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
    OracleName.ISOLATION,
    OracleName.BATCH_INVARIANCE,
)


def peak_of(case: Case) -> int:
    from loragate.core.machine import detect_machine

    subject, have = load_subject("torch")
    assert not isinstance(have, str)
    with LiveBytes() as live:
        judgements = run_trial(Trial(case, subject, have, detect_machine(), 7))
    assert {judgement.verdict for judgement in judgements} <= {Verdict.PASS, Verdict.SKIP}
    return live.peak


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("name", LARGE)
def test_an_oracle_takes_less_than_the_estimate(
    name: str, oracle: OracleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 1 << 12)
    case = replace(LARGE[name], oracles=(oracle,))
    # what is fixed would hide the rest of a small case
    assert peak_of(case) < footprint.footprint_bytes(case) - footprint._FIXED
