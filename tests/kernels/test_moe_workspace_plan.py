"""Finding the size of a workspace costs little, however large the batches are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lorakernels.moe.delta import sizes
from lorakernels.moe.delta.plan import MoEShape, ShrinkPlan, plan_shrink
from lorakernels.moe.delta.sizes import largest_shrunk, shrunk_shape

SHAPE = MoEShape(65536, 8, 4096, (7168, 7168), 64, 2)


def test_a_workspace_takes_a_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counted(shape: MoEShape) -> ShrinkPlan:
        planned.append(shape.num_pairs)
        return plan_shrink(shape)

    monkeypatch.setattr(sizes, "plan_shrink", counted)
    largest_shrunk.__wrapped__(SHAPE)
    assert 0 < len(planned) < 500


@pytest.mark.parametrize("rank", [4, 24])
@pytest.mark.parametrize("experts", [1, 20])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_workspace_holds_the_shrink_output_of_every_smaller_batch(
    rank: int, experts: int, itemsize: int
) -> None:
    shape = MoEShape(2500, experts, 4096, (512, 512), rank, itemsize)
    needed = [math.prod(shrunk_shape(replace(shape, num_pairs=n))) for n in range(1, 2501)]
    for most in (1, 17, 300, 2500):
        assert largest_shrunk(replace(shape, num_pairs=most)) == max(needed[:most])


@pytest.mark.parametrize(("experts", "in_features", "rank"), [(8, 768, 256), (8, 2048, 128)])
def test_where_decode_ends_a_workspace_holds_the_partials_of_the_batches_around(
    experts: int, in_features: int, rank: int
) -> None:
    end = SHAPE.tuning.moe.decode_pairs
    shape = MoEShape(2 * end, experts, in_features, (768, 768), rank, 2)
    needed = [math.prod(shrunk_shape(replace(shape, num_pairs=n))) for n in range(1, 2 * end + 1)]
    # the first batches behind decode need the most, which a search that steps over it would miss
    assert max(needed) == max(needed[end : end + 2]) > needed[-1]
    for most in range(1, 2 * end + 1):
        assert largest_shrunk(replace(shape, num_pairs=most)) == max(needed[:most])
