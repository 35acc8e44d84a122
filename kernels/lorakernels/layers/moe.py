"""A mixture-of-experts layer that serves many adapters at once, each row of the batch its own.

Invariant: the layer is built and loaded from whole tensors and cuts its own part of them, in
copies: neither the base weights nor an adapter are ever written to. An adapter is checked and
cut completely before the slot is touched, and the slot is emptied before it moves in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lorakernels.layers.expert_packing import ExpertPacking, ExpertParts, stage_experts
from lorakernels.layers.moe_partition import MoECut, MoERank, cut_moe
from lorakernels.layers.packing import take
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

GATED = ("gate_proj", "up_proj", "down_proj")
Staged = tuple[ExpertFactors | None, ...]


class FusedMoELoRA(nn.Module):
    """sum over the chosen experts e of w_e * down_e(act(gate_e(x), up_e(x))), where each of the
    three projections adds the delta of the row's slot and of the expert.

    w13 [experts, 2 * intermediate, hidden], gate above up, or [experts, intermediate, hidden]
    without a gate; w2 [experts, hidden, intermediate]; both of the whole layer, of which a
    rank keeps its part. `projections` are the names of gate, up and down in an adapter. With
    `shared_outer` the A of gate and up and the B of down are kept once, for all experts, and
    adapters must share them. Raises ValueError.
    """

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        num_slots: int,
        rank: int,
        projections: Sequence[str] = GATED,
        shared_outer: bool = False,
        place: MoERank | None = None,
        padded_intermediate: int | None = None,
    ) -> None:
        super().__init__()
        self.packing = _packing(w13, w2, tuple(projections))
        self.shared_outer = shared_outer
        num_experts, intermediate = self.packing.num_experts, self.packing.intermediate
        self.cut = cut_moe(
            num_experts, intermediate, place or MoERank(), padded_intermediate=padded_intermediate
        )
        local13, local2 = _take_weights(self.packing, self.cut, w13.detach(), w2.detach())
        self.w13 = nn.Parameter(local13, requires_grad=False)
        self.w2 = nn.Parameter(local2, requires_grad=False)
        expert_map = torch.tensor(self.cut.expert_map(num_experts), dtype=torch.int32)
        self.register_buffer("expert_map", expert_map.to(w13.device), persistent=False)
        local, hidden = self.cut.intermediate.size, self.packing.hidden
        self.w13_slots = self._slots(
            num_slots, rank, [local] * self._num_up, hidden, a=shared_outer
        )
        self.w2_slots = self._slots(num_slots, rank, [hidden], local, b=shared_outer)
        self._parts = {
            name: tuple(
                index * num_experts + e
                for index in members
                for e in (range(num_experts) if expert is None else (expert,))
            )
            for name, (expert, members) in self.packing.homes().items()
        }

    @property
    def num_slots(self) -> int:
        return self.w13_slots.num_slots

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """What an adapter may have factors for: each projection of each expert, and each one of
        all experts; with the indices of what it covers. The layer itself is "experts"."""
        return self._parts

    def load_adapter(self, slot: int, parts: ExpertParts) -> None:
        """Put an adapter into a slot, all or nothing. `parts` maps names of `parts` to whole
        factors; a projection that it does not name gets none. ValueError."""
        self.commit(slot, self.stage(parts))

    def unload(self, slot: int) -> None:
        """Empty a slot; its rows then get no delta. ValueError."""
        self.w13_slots.reset(slot)
        self.w2_slots.reset(slot)

    def stage(self, parts: ExpertParts) -> Staged:
        """What `commit` takes: this rank's part of an adapter, checked. ValueError."""
        return stage_experts(
            self.packing,
            self.cut,
            parts,
            max_rank=self.w13_slots.rank,
            like=self.w13_slots.a,
            shared_outer=self.shared_outer,
        )

    def commit(self, slot: int, staged: Staged) -> None:
        """Empty a slot and move a staged adapter in. ValueError."""
        self.w13_slots.load(slot, staged[: self._num_up])
        self.w2_slots.load(slot, staged[self._num_up :])

    @property
    def _num_up(self) -> int:
        return len(self.packing.projections) - 1

    def _slots(
        self,
        num_slots: int,
        rank: int,
        widths: list[int],
        in_features: int,
        *,
        a: bool = False,
        b: bool = False,
    ) -> ExpertWeights:
        return ExpertWeights(
            num_slots=num_slots,
            num_experts=self.cut.experts.size,
            slice_widths=widths,
            in_features=in_features,
            rank=rank,
            dtype=self.w13.dtype,
            device=self.w13.device,
            shared_a=a,
            shared_b=b,
        )


def _packing(w13: Tensor, w2: Tensor, projections: tuple[str, ...]) -> ExpertPacking:
    if len(projections) not in (2, 3) or len(set(projections)) != len(projections):
        raise ValueError(
            "projections must be different names of gate, up and down, or of up and down "
            f"(got {', '.join(projections)})"
        )
    if w2.dim() != 3:
        raise ValueError(f"w2 must be [experts, hidden, intermediate] (got {list(w2.shape)})")
    num_experts, hidden, intermediate = w2.shape
    rows = intermediate * (len(projections) - 1)
    if w13.shape != (num_experts, rows, hidden):
        raise ValueError(
            f"w13 must be [{num_experts}, {rows}, {hidden}], as w2 and the projections "
            f"{', '.join(projections)} say (got {list(w13.shape)})"
        )
    if w13.dtype != w2.dtype or w13.device != w2.device:
        raise ValueError(
            f"w13 and w2 must have one dtype and one device (got {w13.dtype} on {w13.device} "
            f"and {w2.dtype} on {w2.device})"
        )
    return ExpertPacking(projections, num_experts, hidden, intermediate)


def _take_weights(
    packing: ExpertPacking, cut: MoECut, w13: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor]:
    experts, columns = cut.experts, cut.intermediate
    w13, w2 = (w.narrow(0, experts.start, experts.live) for w in (w13, w2))
    if columns.size != packing.intermediate:
        # gate and up each on its own: a cut of both at once would leave a rank without a gate
        halves = torch.split(w13, packing.intermediate, dim=1)
        w13 = torch.cat([take(half, columns, dim=1) for half in halves], dim=1)
        w2 = take(w2, columns, dim=2)
    return w13.contiguous(), w2.contiguous()
