"""A linear layer that serves many adapters at once, one for each row of the batch.

Invariant: the layer is built and loaded from whole tensors and copies its own part of them, so
that the rest can be freed; only a tensor that is not cut is shared. Neither the base weight nor an
adapter is ever written to. An adapter is checked and cut completely before its slot changes, and
the slot is emptied before the adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.choices import check_choice
from lorakernels.common.digests import SavedWeight, digest_in
from lorakernels.dense.check import check_like
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.linear import lora_linear
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.rank_shards import RankShardedSlots
from lorakernels.dense.sharded import sharded_delta
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.packing import Packing, Parts, owned, stage, take, take_packed
from lorakernels.layers.partition import (
    LayerCut,
    LoRASharding,
    Parallel,
    Slice,
    cut_layer,
    cut_rank,
    whole,
)
from lorakernels.layers.sharding import check_sharding, slots_of
from lorakernels.runtime.collectives import Collective, number_of


class LinearAdapters(nn.Module):
    """The adapters of a linear layer: `packing`, which modules they name; `cut`, the part that this
    rank holds of them; and `slots`, where they are. Made by a subclass."""

    packing: Packing
    cut: LayerCut
    # what is cut of adapters: as of the base, or more of it where they are sharded by rank
    adapter_cut: LayerCut
    slots: SlotWeights
    # the group of a layer that is sharded by rank, and its number for operators
    collective: Collective | None
    group: int

    def __init__(self) -> None:
        super().__init__()
        # of the base weight, by the dtype that it was cast to and by what says that it has changed
        self._digests: dict[Hashable, bytes] = {}

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The modules that an adapter may have factors for, and the slices that each covers."""
        names = (*self.packing.slice_names, *self.packing.fused)
        return {name: self.packing.slices_of(name) for name in names}

    def load_adapter(self, slot: int, parts: Parts) -> None:
        """Put an adapter into a slot, all or nothing. `parts` maps names of slices or fused
        modules to whole factors; a slice that it does not name gets none. ValueError."""
        self.commit(slot, self.stage(parts))

    def unload(self, slot: int) -> None:
        """Empty a slot; its rows then get no delta. ValueError."""
        self.slots.reset(slot)

    def stage(self, parts: Parts) -> tuple[LoRAFactors | None, ...]:
        """This rank's part of an adapter, checked, as `commit` takes it. ValueError."""
        staged = stage(
            self.packing, self.adapter_cut, parts, max_rank=self.slots.rank, like=self.slots.a
        )
        for module, factors in parts.items():
            if isinstance(factors, LoRAFactors) and factors.base is not None:
                self._check_base(module, factors.base)
        return staged

    def _check_base(self, module: str | int, base: SavedWeight) -> None:
        """ValueError if an adapter was saved with another base weight than that of this layer."""
        # a layer around another one knows no weight, and a rank has a part of it
        weight = getattr(self, "weight", None)
        if weight is None or tuple(weight.shape) != base.shape or not self._is_whole:
            return
        # either of both may have been rounded to the dtype of the other one
        for dtype in (base.dtype, weight.dtype):
            if self._digest(dtype, weight) == base.digests.get(dtype):
                return
        raise ValueError(
            f"{module} must have the base weight that was saved with the adapter, such as rows "
            f"of added tokens (got another weight {list(base.shape)})"
        )

    def _digest(self, dtype: torch.dtype, weight: Tensor) -> bytes:
        # torch counts the changes in place of what was made outside of inference mode
        version = None if weight.is_inference() else weight._version
        key = dtype, weight.dtype, weight.data_ptr(), version
        if key not in self._digests:
            self._digests[key] = digest_in(dtype, weight)
        return self._digests[key]

    @property
    def _is_whole(self) -> bool:
        """Whether this rank holds the whole layer. One of nothing but padding may be as large."""
        columns = tuple(whole(part.width) for part in self.packing.slices)
        return self.cut.columns == columns and self.cut.inputs == whole(self.packing.in_features)

    def commit(self, slot: int, staged: Sequence[LoRAFactors | None]) -> None:
        """Empty a slot and load a staged adapter into it. ValueError."""
        self.slots.load(slot, staged)

    def join(self, collective: Collective | None) -> None:
        """The group over which adapters are sharded by rank, None where they are not."""
        self.collective = collective
        self.group = -1 if collective is None else number_of(collective)

    def add_sharded(
        self, rows: Tensor, metadata: BatchMetadata, workspace: DenseWorkspace, out: Tensor
    ) -> None:
        """The delta of a layer that is sharded by rank, in place."""
        assert isinstance(self.slots, RankShardedSlots)
        sharded_delta(rows, self.slots, metadata, workspace, out, self.group)


class LoRALinear(LinearAdapters):
    """y = x @ W.T + bias + scale * (x @ A.T) @ B.T, with A, B and scale of each row's slot.

    weight [sum of slice widths, in_features] and bias are those of the whole layer; a column-
    or row-parallel layer keeps its rank's part of them. A layer computes no gradient, and
    `backward` through its result raises RuntimeError. Raises ValueError.

    sharding: RANK cuts both factors of adapters over the ranks of `collective`, which is needed
        for nothing else; `rank` is then rounded up to a multiple of tp_size where the layer is cut
        by columns.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        slices: Sequence[Slice],
        num_slots: int,
        rank: int,
        fused: Mapping[str, Sequence[str]] | None = None,
        parallel: Parallel = Parallel.REPLICATED,
        tp_size: int = 1,
        tp_rank: int = 0,
        padded_in_features: int | None = None,
        sharding: LoRASharding = LoRASharding.BASE,
        collective: Collective | None = None,
    ) -> None:
        super().__init__()
        groups = {name: tuple(members) for name, members in (fused or {}).items()}
        self.packing = Packing(tuple(slices), weight.shape[-1], groups)
        _check_base(self.packing, weight, bias)
        self.cut = cut_layer(
            self.packing.slices,
            self.packing.in_features,
            parallel=parallel,
            tp_size=tp_size,
            tp_rank=tp_rank,
            padded_in_features=padded_in_features,
        )
        columns = self.cut.columns
        local = take(take_packed(weight.detach(), slices, columns), self.cut.inputs, dim=1)
        self.weight = nn.Parameter(owned(local, weight), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias is not None and self.cut.owns_bias:
            live = take_packed(bias.detach(), slices, columns)
            self.bias = nn.Parameter(owned(live, bias), requires_grad=False)
        check_sharding(sharding, collective, tp_size=tp_size, tp_rank=tp_rank)
        self.adapter_cut = self.cut
        self.join(collective)
        if collective is not None:
            part = cut_rank(
                self.packing.slices,
                self.cut,
                rank,
                parallel=parallel,
                tp_size=tp_size,
                tp_rank=tp_rank,
            )
            self.adapter_cut = replace(self.cut, columns=part.columns)
            self.slots = slots_of(part, self.cut, num_slots=num_slots, like=self.weight)
            return
        self.slots = SlotWeights(
            num_slots=num_slots,
            slice_widths=[shard.size for shard in columns],
            in_features=self.cut.inputs.size,
            rank=rank,
            dtype=weight.dtype,
            device=weight.device,
        )

    def forward(
        self,
        x: Tensor,
        metadata: BatchMetadata,
        workspace: DenseWorkspace,
        *,
        form: LinearForm | None = None,
    ) -> Tensor:
        """x [.., local in_features] -> [.., local out_features], with as many rows as
        `metadata` was prepared for. `workspace` is made for `slots`, and may be shared by
        layers that run one after the other. `form`: how base and delta are put together; None
        lets the plan choose. `DUAL` and `STORED` may add up in another order than the forms of one
        stream. The result has no gradient. Raises ValueError.
        """
        if x.shape[-1] != self.cut.inputs.size:
            raise ValueError(f"x must have {self.cut.inputs.size} columns (got {x.shape[-1]})")
        rows = x.reshape(-1, x.shape[-1])
        if self.collective is not None:
            out = self._sharded(rows, metadata, workspace, form)
            return out.view(*x.shape[:-1], out.shape[1])
        out = lora_linear(rows, self.weight, self.bias, self.slots, metadata, workspace, form=form)
        return out.view(*x.shape[:-1], out.shape[1])

    @torch.no_grad()
    def _sharded(
        self,
        rows: Tensor,
        metadata: BatchMetadata,
        workspace: DenseWorkspace,
        form: LinearForm | None,
    ) -> Tensor:
        if form is not None:
            check_choice("form", form, LinearForm)
        if form not in (None, LinearForm.SINGLE):
            raise ValueError(f"form of a layer sharded by rank must be SINGLE (got {form.name})")
        # before the base product, which would raise what it raises
        check_like("x", rows, self.slots.a)
        with _without_autocast(rows.device):
            out = F.linear(rows, self.weight, self.bias)
        self.add_sharded(rows, metadata, workspace, out)
        return out


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Within, products have the dtype of their operands, as in the operators of other layers."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def _check_base(packing: Packing, weight: Tensor, bias: Tensor | None) -> None:
    rows = packing.out_features
    if weight.dim() != 2 or weight.shape[0] != rows:
        raise ValueError(
            f"weight must be [{rows}, in_features], as the slices add up (got {list(weight.shape)})"
        )
    if bias is None:
        return
    if bias.shape != (rows,):
        raise ValueError(f"bias must be [{rows}] (got {list(bias.shape)})")
    check_like("bias", bias, weight)
