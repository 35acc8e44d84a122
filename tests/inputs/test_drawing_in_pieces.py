"""Large tensors are drawn in pieces: the numbers are those of a whole draw, and no copy of a tensor
in a wider dtype is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter
from loragate.inputs import DataKind, make_base, make_batch, make_pool, pieces
from loragate.inputs.base_experts import make_base_experts
from loragate.inputs.draw import Draw
from loragate.matrix.case import LAYER_SITES, Case, Quantisation, RouterWeights, Site
from loragate.subjects.torch.subject import TorchSubject

from .live_bytes import LARGE, LiveBytes, case_of

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)
PIECE = 1 << 12
# a piece, less and more than one, and rests that are smaller than a group of `randn`
SIZES = (1, 15, 17, PIECE, PIECE + 1, PIECE + 15, PIECE + 16, 3 * PIECE + 5, 3 * PIECE + 29)
DRAWS: dict[str, tuple[Callable[[Draw, int], Tensor], Callable[[Draw, int], Tensor]]] = {
    "normal": (
        lambda draw, size: draw.normal(size),
        lambda draw, size: torch.randn(size, generator=draw.generator, device=draw.device),
    ),
    "uniform": (
        lambda draw, size: draw.uniform(-2, 3, size),
        lambda draw, size: (
            torch.rand(size, generator=draw.generator, device=draw.device) * 5.0 - 2.0
        ),
    ),
    "integers": (
        lambda draw, size: draw.integers(-3, 9, size),
        lambda draw, size: torch.randint(
            -3, 9, (size,), generator=draw.generator, device=draw.device
        ),
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DRAWS)
def test_pieces_are_the_whole_tensor_and_leave_the_generator_where_it_does(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", PIECE)
    in_pieces, at_once = DRAWS[name]
    one, other = Draw(CPU, 7, name), Draw(CPU, 7, name)
    assert torch.equal(in_pieces(one, size), at_once(other, size))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU draws in rounds of its own")
@pytest.mark.parametrize("name", DRAWS)
# one and several pieces, and more bytes than an offset of 32 bits reaches in int64, and in fp32
@pytest.mark.parametrize("size", [999, (1 << 25) + 12345, (1 << 28) + 777, (1 << 29) + 4097])
def test_pieces_are_the_whole_tensor_on_a_gpu(name: str, size: int) -> None:
    machine = Machine("cuda", "test", (9, 0), 1, 0)
    in_pieces, at_once = DRAWS[name]
    one, other = Draw(machine, 7, name), Draw(machine, 7, name)
    assert torch.equal(in_pieces(one, size), at_once(other, size))
    assert one.generator.get_offset() == other.generator.get_offset()


THREADS = 512


@dataclass
class ModelledGpu:
    """The part of a generator that pieces use, and how torch draws with it: element by element the
    thread and the place in its stream."""

    offset: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def launch(self, size: int) -> list[tuple[int, int]]:
        threads = min(THREADS, -(-size // 256) * 256)
        start, round_size = self.offset, 4 * threads
        self.offset += 4 * -(-size // round_size)
        return [
            (i % threads, start + 4 * (i // round_size) + i % round_size // threads)
            for i in range(size)
        ]

    def draw(self, size: int, itemsize: int, max_bytes: int) -> list[tuple[int, int]]:
        def parts(size: int) -> Iterator[int]:
            if (size - 1) * itemsize < max_bytes:
                yield size
            else:
                yield from parts(size // 2)
                yield from parts(size - size // 2)

        sizes = list(parts(size))
        if len(sizes) > 1:
            self.launch(size)
        return [number for part in sizes for number in self.launch(part)]


@pytest.mark.parametrize("size", [1, 300, 511, 2048, 2049, 4096, 4100, 12345, 32768, 32769, 99999])
def test_pieces_are_the_whole_tensor_on_a_modelled_gpu(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 5000)
    monkeypatch.setattr(pieces, "_MAX_BYTES", 1 << 17)
    monkeypatch.setattr(pieces, "_threads", lambda device: THREADS)
    one, other = ModelledGpu(), ModelledGpu()
    places = pieces.pieces_of(size, torch.float32, cast(torch.Generator, one))
    drawn = [number for place in places for number in one.launch(place.stop - place.start)]
    assert drawn == other.draw(size, 4, 1 << 17)
    assert one.offset == other.offset


def test_rounds_and_halves_of_a_gpu() -> None:
    assert pieces.halves(range(1 << 28), 8) == [range(1 << 28)]
    size = (1 << 28) + 1
    assert pieces.halves(range(size), 8) == [range(1 << 27), range(1 << 27, size)]
    # of few elements each thread draws one
    assert [pieces.rounds(size, 1024) for size in (1, 1024, 4096, 4097)] == [1, 1, 1, 2]


def make_inputs(case: Case, kind: DataKind) -> int:
    """Draw all inputs of a case; the bytes that they take."""
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    pool, batch = make_pool(case, 1, kind, CPU, have), make_batch(case, 1, 0, kind, CPU)
    kept = [pool.a, *pool.b, batch.x, batch.out]
    if pool.down is not None:
        kept += [pool.down.a, *pool.down.b]
    if case.site is Site.MOE_LAYER:
        experts = make_base_experts(case, 1, kind, CPU)
        kept += [experts.weight, experts.down]
    elif case.site in LAYER_SITES:
        kept.append(make_base(case, 1, kind, CPU).weight)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("kind", DataKind)
@pytest.mark.parametrize("name", LARGE)
def test_no_copy_in_a_wider_dtype_is_alive_while_inputs_are_drawn(
    name: str, kind: DataKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", PIECE)
    with LiveBytes() as live:
        size = make_inputs(LARGE[name], kind)
    # one tensor at a time is copied in its dtype: laid out, or placed between guards
    assert live.peak < 1.7 * size


def test_a_quantised_layer_is_drawn_with_one_copy_in_fp32() -> None:
    case = case_of(
        Site.MOE_LAYER,
        experts=32,
        top_k=2,
        rank=1,
        slots=1,
        router=RouterWeights.OUTPUT,
        quantisation=Quantisation.FP8,
    )
    weights = 3 * case.experts * case.in_features * case.slices[0]
    with LiveBytes() as live:
        make_inputs(case, DataKind.SIGNED)
    assert live.peak < 7 * weights
