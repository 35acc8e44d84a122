"""What `permute` makes of the routes of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_batch
from loragate.matrix.case import Case, Dtype, ExpertMap, Ids, Site
from loragate.oracles.state.permute import _reassigned

CASE = Case(
    site=Site.MOE_DELTA,
    tokens=40,
    in_features=16,
    slices=(8,),
    rank=4,
    slots=2,
    dtype=Dtype.BF16,
    experts=3,
    top_k=2,
)


@pytest.mark.parametrize("ids", [Ids.UNKNOWN, Ids.REPEATED])
def test_experts_that_move_take_their_pairs_along_and_ids_of_no_expert_stay(ids: Ids) -> None:
    case = replace(CASE, ids=ids, expert_map=ExpertMap.LOCAL)
    batch = make_batch(case, 3, 0, DataKind.SIGNED, Machine("cpu", "test", None, 1, 0))
    assert batch.routes is not None
    before = batch.routes.topk_ids.clone()
    moved = _reassigned(batch, [2, 0, 1]).routes
    assert moved is not None
    # the expert that was 2 is now 0, and so on
    place = {2: 0, 0: 1, 1: 2}
    wanted = before.clone().apply_(lambda expert: place.get(expert, expert))
    assert torch.equal(moved.topk_ids, wanted)
    assert bool((before >= 3).any()) == (ids is Ids.UNKNOWN)
