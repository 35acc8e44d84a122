"""Cases that the project's own layers refuse, and their neighbours that they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the subject needs the kernels")

from loragate.matrix.case import (
    Base,
    Beside,
    Case,
    Dtype,
    Parallel,
    Sharding,
    Site,
    Streams,
)
from loragate.matrix.engine_case import Model, Speculation
from loragate.subjects.lorakernels.refusals import refusal
from lorakernels.runtime.tuning import DEFAULT

CASE = Case(
    site=Site.LORA_LINEAR, in_features=64, slices=(96, 48), rank=512, slots=2, dtype=Dtype.BF16
)
SHARDED = replace(CASE, parallel=Parallel.COLUMN, tp=3, sharding=Sharding.RANK)
STORED = replace(CASE, streams=Streams.DUAL, beside=Beside.DELTA)
ENGINE = Case(
    site=Site.ENGINE, tokens=0, in_features=0, slices=(), rank=8, slots=2, dtype=Dtype.BF16
)
HYBRID = replace(ENGINE, model=Model.HYBRID)
MOST_ROWS = DEFAULT.dense.stored_values // (96 + 48)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (SHARDED, "rank 512, cut into 3 equal parts, is rounded up above 512"),
        (
            replace(SHARDED, site=Site.MOE_LAYER, parallel=Parallel.REPLICATED),
            "rank 512, cut into 3 equal parts, is rounded up above 512",
        ),
        (
            replace(STORED, tokens=MOST_ROWS, spare_rows=1),
            f"a delta is kept beside the base product up to {DEFAULT.dense.stored_values} values",
        ),
        (
            replace(CASE, base=Base.CALLABLE, streams=Streams.DUAL),
            "a layer around a linear that exists runs on one stream",
        ),
        (replace(ENGINE, streams=Streams.DUAL), "the decoder runs its layers on one stream"),
        (
            replace(HYBRID, speculation=Speculation.NGRAM),
            "the state of its delta nets cannot be taken back from a rejected draft",
        ),
    ],
)
def test_a_case_beyond_what_a_layer_can_do_is_refused_with_its_reason(case: Case, reason: str):
    assert refusal("cpu", case) == reason


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(SHARDED, rank=510),
        replace(SHARDED, tp=4),
        replace(SHARDED, sharding=Sharding.BASE),
        # A is whole where the inputs are cut
        replace(SHARDED, parallel=Parallel.ROW, slices=(96,)),
        replace(STORED, tokens=MOST_ROWS),
        # a rank keeps its own columns
        replace(STORED, tokens=2 * MOST_ROWS, parallel=Parallel.COLUMN, tp=2),
        replace(CASE, tokens=2 * MOST_ROWS, streams=Streams.DUAL),
        *(
            replace(ENGINE, model=model, speculation=speculation)
            for model in (Model.DENSE, Model.MOE)
            for speculation in Speculation
        ),
    ],
)
def test_a_case_at_the_limit_is_run(case: Case):
    assert refusal("cpu", case) is None
