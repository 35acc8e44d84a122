"""The deltas of a MoE layer of vLLM: w13 prepares the pairs of a step, w2 uses them again.

vLLM calls these outside of traced graphs, in its opaque operator of a MoE layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.slice_stacks import PackedFactors, Slices, check_constants, whole
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.ops import align_step
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.ops import add_delta
from lorakernels.runtime.prepared import FixedTensors

# two of each MoE layer, and of the slices in their reverse order
_MOST_FACTORS = 1 << 12


class ExpertDeltas:
    """The deltas of MoE layers with as many experts, which run one after the other.

    pairs: its buffers stay the same ones. constants: ranks and scales, at least slots * slices
    values, the same for all. The memory of the slices of a layer that was served is kept.
    """

    def __init__(self, pairs: PairMetadata, constants: tuple[Tensor, Tensor]) -> None:
        self.pairs, self._constants = pairs, constants
        self._buffers = FixedTensors(pairs.buffers)
        # by all of the slices that they follow from. Nothing else comes to the place of a slice,
        # since its memory is kept
        self._factors: dict[Hashable, _Factors] = {}

    def prepare(self, topk_ids: Tensor, row_slots: Tensor) -> None:
        """Install the routing of a step, [rows, top_k]. row_slots: that of StepTables."""
        ids = topk_ids.to(torch.int32).contiguous()
        pairs = self.pairs
        # nothing is noted of this tensor: the mapping is that of the live rows, and this step is
        # padded
        unknown = pairs.num_tiles
        align_step(
            self._tables(len(ids)), ids, row_slots, None, batch_rows=unknown, step=pairs.step
        )

    def add(
        self,
        y: Tensor,
        x: Tensor,
        a: Slices,
        b: Slices,
        *,
        router_weights: Tensor | None,
        add_inputs: bool,
    ) -> None:
        """y[pair] += w[pair] * (x_row @ A[slot, expert].T) @ B[slot, expert].T in place, for each
        pair of the prepared step that has a slot.

        y [.., out_features], contiguous, has a row for each pair; x one for each row or each pair.
        a, b: the slices of a packed layer in the order in which y has them, which may be the
        reverse of memory's. add_inputs: False writes the delta alone. Raises ValueError.
        """
        out, factors = y.view(-1, y.shape[-1]), self._factors_of(a, b)
        if not factors.is_swapped:
            self._launch(out, x, factors, router_weights, add_inputs)
            return
        delta = torch.zeros_like(out)
        self._launch(delta, x, factors, router_weights, add_inputs=True)
        delta = delta.roll(-factors.widths[0], dims=1)
        out.add_(delta) if add_inputs else out.copy_(delta)

    def _tables(self, num_rows: int) -> PairTables:
        return PairTables.of_fixed(self._buffers, num_rows, self.pairs.sizes)

    def _factors_of(self, a: Slices, b: Slices) -> _Factors:
        """A layer has the same slices in each step, if as other views of them. ValueError."""
        key = tuple(map(_place, (*a, *b)))
        known = self._factors.get(key)
        if known is None:
            known = _Factors.of(a, b, self._constants)
            while len(self._factors) >= _MOST_FACTORS:
                del self._factors[next(iter(self._factors))]
            self._factors[key] = known
        return known

    def _launch(
        self,
        out: Tensor,
        x: Tensor,
        factors: _Factors,
        router_weights: Tensor | None,
        add_inputs: bool,
    ) -> None:
        add_delta(
            x,
            factors.slots,
            factors.widths,
            self._tables(self.pairs.num_rows),
            self.pairs.step,
            # a buffer of the server is not on the stream that this may run on
            shrunk=None,
            out=out,
            router_weights=router_weights,
            add_inputs=add_inputs,
            path=None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """What the slices of a layer are parts of, as `add_delta` takes it. `widths` are in memory's
    order, from which that of the slices differs where they are swapped."""

    slots: FixedTensors
    widths: tuple[int, ...]
    is_swapped: bool

    @classmethod
    def of(cls, a: Slices, b: Slices, constants: tuple[Tensor, Tensor]) -> _Factors:
        """ValueError."""
        packed, is_swapped = factors_of(a, b)
        check_constants(*constants, packed.a)
        slots = FixedTensors((packed.a, packed.b, *constants))
        return cls(slots, tuple(packed.widths), is_swapped)


def _place(part: Tensor) -> Hashable:
    return part.data_ptr(), part.shape, part.stride(), part.dtype


def factors_of(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[PackedFactors, bool]:
    """The buffers behind the slices of a layer, and whether two slices come in the reverse of
    memory's order. Raises ValueError."""
    is_swapped = a[0].storage_offset() > a[-1].storage_offset()
    if is_swapped:
        a, b = a[::-1], b[::-1]
    return whole(a[0], b[0], [part.shape[2] for part in b]), is_swapped
