"""What a case asks for must have happened, where its requests make sure that it can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.core.verdict import Failure, Verdict
from loragate.engine.requests import EngineCounts
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Ends, Graphs, Speculation, Weights
from loragate.oracles.engine.liveness import _judged

COUNTED = EngineCounts(
    drafts_accepted=3, drafts_rejected=2, graphs_replayed=4, kernels_launched=5, kernels_captured=6
)
CASE = Case(
    site=Site.ENGINE,
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
    graphs=Graphs.FULL_DECODE,
    speculation=Speculation.NGRAM,
)


@pytest.mark.parametrize(
    "count", ["drafts_accepted", "drafts_rejected", "graphs_replayed", "kernels_launched"]
)
def test_each_count_that_the_case_asks_for_must_be_above_0(count: str) -> None:
    assert _judged(CASE, COUNTED).verdict is Verdict.PASS
    # no graph either, of which captured kernels would be launched
    changes = {count: 0} if count != "kernels_launched" else {count: 0, "kernels_captured": 0}
    found = _judged(CASE, replace(COUNTED, **changes))
    assert (found.verdict, found.failure) == (Verdict.FAIL, Failure.IDLE)
    assert count.replace("_", " ") in found.message


@pytest.mark.parametrize(
    ("weights", "speculation", "verdict"),
    [
        (Weights.RANDOM, Speculation.NGRAM, Verdict.PASS),
        (Weights.LANGUAGE, Speculation.NGRAM, Verdict.FAIL),
        (Weights.RANDOM, Speculation.DRAFT_MODEL, Verdict.FAIL),
    ],
)
def test_right_drafts_of_n_grams_are_asked_for_of_random_texts_that_repeat_themselves(
    weights: Weights, speculation: Speculation, verdict: Verdict
) -> None:
    case = replace(CASE, weights=weights, speculation=speculation)
    without = replace(COUNTED, drafts_accepted=0)
    # 5 is followed by 6 or by 7, whichever place a drafter takes
    by_chance = ((5, 6, 5, 7), (5, 6, 1, 2))
    found = _judged(case, without, [by_chance, by_chance])
    assert found.verdict is verdict
    assert ("drafts accepted" in found.metrics) is (verdict is Verdict.FAIL)
    certain = ((5, 6, 5, 6), (5, 6, 1, 2))
    assert _judged(case, without, [by_chance, certain]).verdict is Verdict.FAIL
    # others may find none
    assert _judged(case, replace(COUNTED, drafts_rejected=0), [by_chance]).verdict is Verdict.FAIL


@pytest.mark.parametrize("count", ["others_launched", "others_captured"])
def test_kernels_of_another_implementation_must_not_have_served_layers(count: str) -> None:
    assert _judged(CASE, replace(COUNTED, others_launched=0, others_captured=0)).verdict is (
        Verdict.PASS
    )
    found = _judged(CASE, replace(COUNTED, **{count: 2}))
    assert (found.verdict, found.failure) == (Verdict.FAIL, Failure.IDLE)
    assert "another implementation" in found.message
    assert "2 ran or were captured" in found.message


@pytest.mark.parametrize(
    ("graphs", "speculation", "weights", "verdict"),
    [
        # n-grams may find as many drafts for all requests of a step in no step
        (Graphs.FULL_DECODE, Speculation.NGRAM, Weights.RANDOM, Verdict.PASS),
        (Graphs.FULL_DECODE, Speculation.NGRAM, Weights.LANGUAGE, Verdict.FAIL),
        (Graphs.FULL, Speculation.NGRAM, Weights.RANDOM, Verdict.FAIL),
        (Graphs.FULL_DECODE, Speculation.DRAFT_MODEL, Weights.RANDOM, Verdict.FAIL),
        (Graphs.FULL_DECODE, Speculation.NONE, Weights.RANDOM, Verdict.FAIL),
    ],
)
def test_graphs_of_decode_steps_are_not_asked_for_where_drafts_come_by_chance(
    graphs: Graphs, speculation: Speculation, weights: Weights, verdict: Verdict
) -> None:
    case = replace(CASE, graphs=graphs, speculation=speculation, weights=weights)
    without = replace(COUNTED, graphs_replayed=0)
    found = _judged(case, without)
    assert found.verdict is verdict
    assert ("graphs replayed" in found.metrics) is (verdict is Verdict.FAIL)
    # answers that end early leave fewer steps in which all requests have drafts
    ended = _judged(replace(case, ends=Ends.STOP), without)
    by_chance = (graphs, speculation) == (Graphs.FULL_DECODE, Speculation.NGRAM)
    assert ended.verdict is (Verdict.PASS if by_chance else Verdict.FAIL)
