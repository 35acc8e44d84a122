"""Site embedding in plain torch: right layers pass, and mistakes of the look-up fail. Its ids have
the ends of each rank among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName, Verdict
from loragate.inputs import DataKind, make_base, make_batch, make_pool
from loragate.inputs.vocabulary import as_linear
from loragate.matrix.case import Case, Cut, Dtype, Ids, Layout, Mix, Site
from loragate.oracles import ORACLES
from loragate.oracles.numeric.golden import golden
from loragate.protocol import AnyInstance, BaseLayer, Batch, Trial
from loragate.subjects.torch.embedding import Embedding, Shard
from loragate.subjects.torch.subject import TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.EMBEDDING,
    tokens=24,
    in_features=31,
    slices=(40,),
    rank=6,
    slots=4,
    dtype=Dtype.BF16,
    mix=Mix.SHUFFLED,
)
CUT = replace(CASE, tp=3, cut=Cut.PADDED, ids=Ids.UNKNOWN)
NUMERICS = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
    OracleName.ISOLATION,
    OracleName.RANGE,
)


class NextColumn(Embedding):
    """A and the weight are looked up at the next id of the rank."""

    def looked_up(self, shard: Shard, ids: Tensor) -> Tensor:
        moved = torch.where(ids + 1 < shard.first + len(shard.weight), ids + 1, ids)
        return super().looked_up(shard, moved)


class ForeignIds(Embedding):
    """An id of another rank, or of none, gets the first row of this one."""

    def looked_up(self, shard: Shard, ids: Tensor) -> Tensor:
        local = ids - shard.first
        is_here = (local >= 0) & (local < len(shard.weight))
        return super().looked_up(shard, ids.where(is_here, shard.first))


class LostLastId(Embedding):
    """The last id of each rank is taken for one of the next."""

    def looked_up(self, shard: Shard, ids: Tensor) -> Tensor:
        last = shard.first + len(shard.weight) - 1
        return super().looked_up(shard, ids.where(ids != last, -1))


class NoScale(Embedding):
    def looked_up(self, shard: Shard, ids: Tensor) -> Tensor:
        plain = {slot: (a, b, 1.0) for slot, (a, b, _) in shard.slots.items()}
        return super().looked_up(replace(shard, slots=plain), ids)


class Subject(TorchSubject):
    def __init__(self, layer: type[Embedding]) -> None:
        self.layer = layer

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        assert base is not None
        return self.layer(case, base)


def verdicts(case: Case, layer: type[Embedding], seed: int = 3) -> dict[OracleName, Verdict]:
    subject = Subject(layer)
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    trial = Trial(case, subject, have, CPU, seed)  # type: ignore[arg-type]
    return {name: ORACLES[name].judge(trial).verdict for name in NUMERICS}


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        CUT,
        replace(CUT, tp=2, layout=Layout.COLUMN_SLICE, tokens=9),
        replace(CASE, layout=Layout.TRANSPOSED, rank=1),
        replace(CASE, layout=Layout.PADDED_ROWS, ids=Ids.UNKNOWN, tokens=2),
    ],
)
def test_a_right_layer_passes(case: Case, dtype: Dtype) -> None:
    for seed in (3, 4):
        found = verdicts(replace(case, dtype=dtype), Embedding, seed)
        assert set(found.values()) == {Verdict.PASS}, (seed, found)


@pytest.mark.parametrize(
    ("case", "layer"),
    [
        (CASE, NextColumn),
        (CUT, NextColumn),
        (CUT, ForeignIds),
        (replace(CASE, ids=Ids.UNKNOWN), ForeignIds),
        (CASE, LostLastId),
        (replace(CASE, in_features=30, tp=3), LostLastId),
        (CASE, NoScale),
    ],
)
def test_a_wrong_layer_fails_in_both_numeric_oracles(case: Case, layer: type[Embedding]) -> None:
    found = verdicts(case, layer)
    assert found[OracleName.REFERENCE] is Verdict.FAIL
    assert found[OracleName.EXACT] is Verdict.FAIL


def step(case: Case, seed: int, number: int = 0) -> Batch:
    return make_batch(case, seed, number, DataKind.SIGNED, CPU)


def test_the_right_result_is_the_row_of_the_id_and_the_product_with_its_column() -> None:
    case = CUT
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    pool = make_pool(case, 5, DataKind.SIGNED, CPU, have)
    base, batch = make_base(case, 5, DataKind.SIGNED, CPU), step(case, 5)
    assert base.weight.shape == (31, 40)
    right = golden(*as_linear(case, pool, batch, base)).out
    for row, (number, slot) in enumerate(zip(batch.x[:, 0], batch.token_slots, strict=True)):
        wanted = torch.zeros(40, dtype=torch.float64)
        if 0 <= number < 31:
            wanted += functional.embedding(number.long(), base.weight).double()
            if slot >= 0:
                column = pool.a[slot, 0, :, number].double()
                wanted += pool.scales[slot][0] * pool.b[0][slot].double() @ column
        torch.testing.assert_close(right[row], wanted)


def test_the_ends_of_each_rank_and_ids_that_do_not_exist_are_in_every_batch_with_room() -> None:
    for number in range(3):
        ids = set(step(CUT, 5, number).x[:, 0].tolist())
        assert ids >= {0, 10, 11, 21, 22, 30}
        assert ids - set(range(31)) == {-1, -11, 31, 41, 1 << 30, -(1 << 30)}
        assert set(step(CASE, 5, number).x[:, 0].tolist()) <= set(range(31))
    first, second = (step(CUT, 5, number).x[:, 0].tolist() for number in range(2))
    assert first.index(30) != second.index(30)


def test_ids_are_of_either_type_and_lie_among_other_ids() -> None:
    types = {step(CASE, seed).x.dtype for seed in range(8)}
    assert types == {torch.int32, torch.int64}
    apart = step(replace(CASE, layout=Layout.COLUMN_SLICE), 5).x
    assert apart.shape == (24, 1)
    assert apart.stride(0) > 1
    around = apart.as_strided((24, 1), apart.stride(), apart.storage_offset() + 1)
    assert set(around.flatten().tolist()) == {1}
