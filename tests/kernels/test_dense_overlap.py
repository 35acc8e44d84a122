"""Which memory a dense delta may write: operands that overlap each other or themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.check import overlap, overlaps_itself  # noqa: E402
from lorakernels.dense.ops import (  # noqa: E402
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402

ROWS, K, WIDTH = 5, 24, 16


class Step:
    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a = torch.randn(4, K, generator=generator)
        self.b = torch.randn(WIDTH, 4, generator=generator)
        self.weights = SlotWeights(
            num_slots=1,
            slice_widths=(WIDTH,),
            in_features=K,
            rank=4,
            dtype=torch.float32,
            device="cpu",
        )
        self.weights.load(0, [LoRAFactors(self.a, self.b, 2.0)])
        self.metadata = BatchMetadata(max_tokens=rows, max_slots=1, device="cpu")
        self.metadata.prepare(torch.zeros(rows, dtype=torch.int32))
        self.workspace = DenseWorkspace([self.weights], max_tokens=rows)

    def run(self, x: Tensor, out: Tensor) -> None:
        dense_delta(x, self.weights, self.metadata, self.workspace, out)

    def expected(self, x: Tensor) -> Tensor:
        return 2.0 * (x.double() @ self.a.double().T) @ self.b.double().T


@pytest.mark.parametrize("beside", [False, True])
def test_one_row_may_be_the_input_of_all_rows(beside: bool) -> None:
    step = Step()
    buffer = torch.randn(ROWS, K + WIDTH, generator=torch.Generator().manual_seed(1))
    out = buffer[:, K:] if beside else torch.empty(ROWS, WIDTH)
    out.zero_()
    x = buffer[2, :K].expand(ROWS, K)
    assert x.stride(0) == 0
    step.run(x, out)
    torch.testing.assert_close(out.double(), step.expected(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((ROWS, WIDTH), (0, 1)),
        ((ROWS, WIDTH), (WIDTH, 0)),
        ((ROWS, WIDTH), (WIDTH - 1, 1)),
        ((ROWS, WIDTH), (1, ROWS - 1)),
        ((ROWS, WIDTH), (0, 0)),
    ],
)
def test_an_output_whose_elements_share_a_place_is_refused(
    shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    step, buffer = Step(), torch.zeros(ROWS * WIDTH)
    out = buffer.as_strided(shape, strides)
    shrunk = torch.zeros(shrunk_shape(ROWS, step.weights))
    shrink_in_tiles(torch.ones(ROWS, K), step.weights, step.metadata, shrunk)
    with pytest.raises(ValueError, match="out must not overlap itself in memory"):
        step.run(torch.ones(ROWS, K), out)
    with pytest.raises(ValueError, match="out must not overlap itself in memory"):
        expand_from_tiles(shrunk, step.weights, step.metadata, out)
    assert not buffer.any()


def test_an_expanded_input_that_the_output_would_write_is_refused() -> None:
    step, buffer = Step(), torch.zeros(ROWS, K + WIDTH)
    with pytest.raises(ValueError, match="out must not overlap x in memory"):
        step.run(buffer[2, :K].expand(ROWS, K), buffer[:, K - 1 : K - 1 + WIDTH])
    assert not buffer.any()


def test_single_columns_of_one_buffer_may_have_any_stride_between_columns() -> None:
    buffer = torch.zeros(ROWS, 4)
    x, out = buffer[:, ::3][:, :1], buffer[:, 1:2]
    assert x.stride(1) == 3
    assert not overlap(x, out)
    assert not overlap(out, x)
    assert overlap(x, buffer[:, :1])


def test_a_single_row_has_any_stride() -> None:
    step, buffer = Step(rows=1), torch.ones(K + WIDTH)
    x = buffer.as_strided((1, K), (0, 1))
    out = buffer.as_strided((1, WIDTH), (0, 1), K).zero_()
    step.run(x, out)
    torch.testing.assert_close(out.double(), step.expected(x), rtol=1e-5, atol=1e-4)


def places(tensor: Tensor) -> list[int]:
    (rows, columns), (down, right) = tensor.shape, tensor.stride()
    start = tensor.storage_offset()
    return [start + i * down + j * right for i in range(rows) for j in range(columns)]


sizes = st.integers(1, 5)
strides = st.integers(0, 12)


@settings(max_examples=200)
@given(sizes, sizes, strides, strides)
def test_overlap_of_a_tensor_with_itself_is_found_exactly(
    rows: int, columns: int, down: int, right: int
) -> None:
    tensor = torch.empty(128).as_strided((rows, columns), (down, right))
    found = places(tensor)
    assert overlaps_itself(tensor) == (len(set(found)) < len(found))


@settings(max_examples=300)
@given(st.data())
def test_what_is_said_not_to_overlap_does_not(data: st.DataObject) -> None:
    buffer, rows = torch.empty(256), data.draw(sizes)
    x, out = (
        buffer.as_strided(
            (rows, data.draw(sizes)),
            (data.draw(strides), data.draw(st.integers(1, 3))),
            data.draw(st.integers(0, 12)),
        )
        for _ in range(2)
    )
    if not overlap(x, out):
        assert set(places(x)).isdisjoint(places(out))


@settings(max_examples=200)
@given(st.data())
def test_columns_of_one_buffer_overlap_only_where_they_share_a_place(data: st.DataObject) -> None:
    width, rows = data.draw(st.integers(2, 12)), data.draw(st.integers(2, 5))
    buffer = torch.empty(rows + 2, width)

    def draw() -> Tensor:
        first, start = data.draw(st.integers(0, 2)), data.draw(st.integers(0, width - 1))
        return buffer[first : first + rows, start : data.draw(st.integers(start + 1, width))]

    x, out = draw(), draw()
    if data.draw(st.booleans()):
        x = x[data.draw(st.integers(0, rows - 1))].expand(rows, x.shape[1])
    shared = not set(places(x)).isdisjoint(places(out))
    # columns that overlap in other rows are refused as well
    same_columns = not {p % width for p in places(x)}.isdisjoint(p % width for p in places(out))
    assert shared <= overlap(x, out) <= same_columns


def test_one_row_beside_the_columns_of_several_does_not_overlap_whatever_its_stride() -> None:
    buffer = torch.empty(4, 20)
    out = buffer[:, 8:16]
    for stride in (1, 3, 20, 50):
        # in the second row
        assert not overlap(buffer.as_strided((1, 6), (stride, 1), 20), out)
        assert overlap(buffer.as_strided((1, 9), (stride, 1), 20), out)
