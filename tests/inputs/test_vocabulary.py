from __future__ import annotations

import torch

from loragate.core.machine import Machine
from loragate.inputs.draw import Draw
from loragate.inputs.vocabulary import make_ids
from loragate.matrix.case import Case, Dtype, Ids, Site

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.EMBEDDING,
    tokens=64,
    in_features=40,
    slices=(16,),
    rank=4,
    slots=2,
    dtype=Dtype.FP32,
    ids=Ids.UNKNOWN,
)


def test_unknown_int64_ids_exist_once_they_are_cut_to_32_bits() -> None:
    widths = set()
    for seed in range(8):
        ids = make_ids(CASE, seed, 0, Draw(CPU, seed, "ids"))
        widths.add(ids.dtype)
        beyond = ids[(ids < 0) | (ids >= CASE.in_features)].long()
        cut = beyond.to(torch.int32)
        exist = (cut >= 0) & (cut < CASE.in_features)
        assert bool(exist.any()) == (ids.dtype == torch.int64)
    assert widths == {torch.int32, torch.int64}
