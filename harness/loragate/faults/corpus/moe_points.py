"""Small MoE cases that run with a fault planted; see points.py."""

from __future__ import annotations

from typing import Any

from loragate.core.verdict import OracleName as O
from loragate.faults.corpus.points import EVERY, NUMERIC
from loragate.faults.model import Check
from loragate.matrix.case import Case, Dtype, Path, RouterWeights, Site

# several tiles of one expert and slot, unequal slices, a rank that no vector of ranks divides
_DEFAULTS: dict[str, Any] = {
    "tokens": 9,
    "in_features": 48,
    "slices": (40, 24),
    "rank": 12,
    "slots": 3,
    "dtype": Dtype.BF16,
    "experts": 3,
    "top_k": 2,
    "oracles": NUMERIC,
}


def pairs(**axes: Any) -> Case:
    return Case(**({"site": Site.MOE_DELTA} | _DEFAULTS | axes))


def two_kernel(**axes: Any) -> Case:
    return pairs(path=Path.TWO_KERNEL, **axes)


def one_shot(**axes: Any) -> Case:
    return pairs(path=Path.ONE_SHOT, **axes)


def small_batch(**axes: Any) -> Case:
    return pairs(path=Path.SMALL_BATCH, **axes)


def served(**axes: Any) -> Case:
    """A whole layer."""
    shape = {"tokens": 6, "in_features": 40, "slices": (24, 24), "rank": 8}
    router = {"router": RouterWeights.OUTPUT, "oracles": (O.REFERENCE, O.EXACT, O.BASE_ROWS)}
    return Case(**({"site": Site.MOE_LAYER} | _DEFAULTS | shape | router | axes))


# for faults that every oracle judges
MOE_SMALL = pairs(tokens=7, in_features=16, slices=(16, 8), oracles=EVERY)

EXPERT_CHECKS = (
    Check.PAIRS,
    Check.PAIR_PLANS,
    Check.PAIR_WORKSPACE,
    Check.PAIR_ORDER,
    Check.FAR_PAIRS,
    Check.EXPERT_COMPILES,
    Check.EXPERT_LAYER,
    Check.EXPERT_QUANTISED,
    Check.EXPERT_RANKS,
    Check.EXPERT_SLOTS,
    Check.EXPERT_FILES,
)
