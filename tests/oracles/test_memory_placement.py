"""Guard bands and poison, on which the canary oracle relies."""

from __future__ import annotations

import pytest
import torch

from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_batch
from loragate.inputs.placement import Band, bits_of, copy_placed, owned, place, same_place, whole
from loragate.inputs.poison import poisoned_allocations
from loragate.matrix.case import Case, Dtype, Layout, Site

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_placed_tensor_has_its_values_and_guards_on_every_side(
    dtype: torch.dtype, layout: Layout, values: torch.Tensor
) -> None:
    view = place(values.to(dtype), layout, margin=3)
    assert torch.equal(view, values.to(dtype))
    storage, mine = whole(view), owned(view)
    assert int(mine.sum()) == 12
    assert storage[~mine].isnan().all()
    first, last = (int(mine.nonzero()[i]) for i in (0, -1))
    # a tile of 64 rows too many still lands in the guard
    assert first >= 64 * 3
    assert len(storage) - last > 64 * 3


@pytest.mark.parametrize(
    ("layout", "x", "out"),
    [
        (Layout.CONTIGUOUS, (4, 1), (5, 1)),
        (Layout.COLUMN_SLICE, (10, 1), (11, 1)),
        (Layout.PADDED_ROWS, (4, 1), (5, 1)),
        (Layout.TRANSPOSED, (1, 3), (5, 1)),
        (Layout.OUTPUT_SLICE, (4, 1), (11, 1)),
    ],
)
def test_layouts_differ_in_the_strides_of_inputs_and_outputs(
    layout: Layout, x: tuple[int, int], out: tuple[int, int]
) -> None:
    case = Case(
        site=Site.DENSE_DELTA,
        tokens=3,
        in_features=4,
        slices=(5,),
        rank=2,
        slots=2,
        dtype=Dtype.FP32,
        layout=layout,
    )
    batch = make_batch(case, 0, 0, DataKind.EXACT, Machine("cpu", "test", None, 1, 0))
    assert (batch.x.stride(), batch.out.stride()) == (x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [1.0, -0.25])
def test_a_guard_around_an_output_shows_that_something_was_added_to_it(
    dtype: torch.dtype, added: float, values: torch.Tensor
) -> None:
    storage = whole(place(values.to(dtype), Layout.CONTIGUOUS, band=Band.NUMBER))
    before = bits_of(storage).clone()
    storage[0] += added
    assert bits_of(storage)[0] != before[0]
    assert torch.equal(bits_of(storage)[1:], before[1:])


@pytest.mark.parametrize("layout", Layout)
def test_a_copy_has_its_own_guards_and_shares_nothing(layout: Layout, values: torch.Tensor) -> None:
    view = place(values, layout, margin=3)
    copy = copy_placed(view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    assert torch.equal(bits_of(whole(copy)), bits_of(whole(view)))
    copy.zero_()
    assert torch.equal(view, values)
    assert not same_place(view, whole(copy)).any()


def test_bits_distinguish_what_numbers_do_not() -> None:
    assert bits_of(torch.tensor(0.0)) != bits_of(torch.tensor(-0.0))
    nan = torch.tensor(float("nan"))
    assert bits_of(nan) == bits_of(nan.clone())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_inside_the_poison_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(4, dtype=dtype)
    with poisoned_allocations():
        fresh = [
            torch.empty(4, dtype=dtype),
            torch.empty_like(like),
            torch.empty_strided((2, 2), (2, 1), dtype=dtype),
            like.new_empty(4),
            like.new_empty_strided((2, 2), (2, 1)),
        ]
        assert torch.zeros(4, dtype=dtype).eq(0).all()
    assert all(tensor.isnan().all() for tensor in fresh)


def test_inside_the_poison_a_fresh_index_leads_far_away() -> None:
    with poisoned_allocations():
        assert torch.empty(1, dtype=torch.int32).item() == 0x7F7F7F7F
        assert torch.empty(1, dtype=torch.int64).item() == 0x7F7F7F7F7F7F7F7F
        assert torch.empty(1, dtype=torch.bool).item() is True
        assert torch.empty(1, device="meta").device.type == "meta"


def test_the_poison_ends_with_its_context_and_also_after_an_error() -> None:
    allocate = torch.empty
    with poisoned_allocations():
        assert torch.empty is not allocate
    assert torch.empty is allocate
    with pytest.raises(RuntimeError), poisoned_allocations():
        torch.empty(-1)
    assert torch.empty is allocate
