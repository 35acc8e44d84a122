"""The estimate of a case's device memory is above what its oracles take, and not far above."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.core.machine import detect_machine, select_interpreter
from loragate.core.verdict import OracleName, Verdict
from loragate.inputs import pieces
from loragate.matrix import footprint
from loragate.matrix.case import Case, Quantisation
from loragate.protocol import Trial
from loragate.run.trial import load_subject, run_trial

from .live_bytes import CHOICES, CUT, LARGE, QUANTISED, LiveBytes

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
WHOLE = {**LARGE, "experts in fp8": QUANTISED, "choices of tokens": CHOICES}
# those that take most for their row of the table; a GPU's kernels take long in the interpreter
OF_CUT = (OracleName.REFERENCE, OracleName.BASE_ROWS, OracleName.SEQUENCE)
# the largest estimates of all are theirs
DECIDING = (OracleName.REFERENCE, OracleName.CANARY)
# they need results without rounding
SKIPPED_IF_QUANTISED = {OracleName.EXACT, OracleName.PERMUTE}
# an estimate is less than this many times what is taken, measured: most where the reference could
# gather all experts at once and does not
MOST = 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 1 << 12)


def estimate_of(case: Case) -> int:
    """What is fixed would hide the rest of a small case."""
    return footprint.footprint_bytes(case) - footprint._FIXED


def peak_of(case: Case, subject_name: str = "torch") -> int:
    subject, have = load_subject(subject_name)
    assert not isinstance(have, str)
    skipped = SKIPPED_IF_QUANTISED if case.quantisation is not Quantisation.NONE else set()
    with LiveBytes() as live:
        judgements = run_trial(Trial(case, subject, have, detect_machine(), 7))
    assert {judgement.oracle: judgement.verdict for judgement in judgements} == {
        oracle: Verdict.SKIP if oracle in skipped else Verdict.PASS for oracle in case.oracles
    }
    return live.peak


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("name", WHOLE)
def test_an_oracle_takes_less_than_the_estimate(name: str, oracle: OracleName) -> None:
    case = replace(WHOLE[name], oracles=(oracle,))
    assert peak_of(case) < estimate_of(case)


@pytest.mark.parametrize("oracle", OF_CUT)
@pytest.mark.parametrize("name", CUT)
def test_ranks_with_factors_of_their_own_take_less_than_the_estimate(
    name: str, oracle: OracleName
) -> None:
    case = replace(CUT[name], oracles=(oracle,))
    assert peak_of(case, "lorakernels") < estimate_of(case)


@pytest.mark.parametrize("name", WHOLE)
def test_an_estimate_is_not_far_above_what_is_taken(name: str) -> None:
    case = replace(WHOLE[name], oracles=DECIDING)
    assert estimate_of(case) < MOST * peak_of(case)


def test_a_case_without_oracles_takes_what_is_fixed() -> None:
    case = replace(LARGE["rows"], oracles=())
    assert footprint.footprint_bytes(case) == footprint._FIXED


def test_rows_that_only_an_instance_has_are_counted_once() -> None:
    case = LARGE["rows"]
    more = estimate_of(replace(case, spare_rows=100)) - estimate_of(case)
    assert more == 100 * (case.in_features + case.out_features) * 2
