"""From the modules of an adapter to the slices of one rank of a layer.

Invariant: the result is complete, checked and independent of the input: a rank's part is cut from
the whole factors every time and never from an earlier cut (vllm #20873).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.common.stacked_weights import check_scale
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.casting import cast_all
from lorakernels.layers.moe_partition import HeldExperts
from lorakernels.layers.partition import LayerCut, Shard, Slice, whole
from lorakernels.moe.weights import Factors

# keys are names of slices or of fused modules, or indices of slices
Parts = Mapping[str, Factors | None] | Mapping[int, Factors | None]


@dataclass(frozen=True, slots=True)
class Packing:
    """The slices of a layer in their order, and `fused`: modules that an adapter may have in
    place of several consecutive slices, as {"qkv_proj": ("q_proj", "k_proj", "v_proj")}."""

    slices: tuple[Slice, ...]
    in_features: int
    fused: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        names = self.slice_names
        if not names:
            raise ValueError("slices must name at least one slice (got none)")
        if len(set(names)) != len(names):
            raise ValueError(f"slices must have different names (got {', '.join(names)})")
        for name, members in self.fused.items():
            if name in names:
                raise ValueError(f"fused module {name} has the name of a slice")
            runs = [names[first : first + len(members)] for first in range(len(names))]
            if not members or tuple(members) not in runs:
                raise ValueError(
                    f"fused module {name} must be consecutive slices of {', '.join(names)} "
                    f"(got {', '.join(members)})"
                )

    @property
    def slice_names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.slices)

    @property
    def out_features(self) -> int:
        return sum(part.width for part in self.slices)

    def slices_of(self, module: str | int) -> tuple[int, ...]:
        """The indices of the slices that a module of the adapter covers. ValueError."""
        names = self.slice_names
        if isinstance(module, int):
            if 0 <= module < len(names):
                return (module,)
        elif module in names:
            return (names.index(module),)
        elif module in self.fused:
            return tuple(names.index(member) for member in self.fused[module])
        known = ", ".join((*names, *self.fused))
        raise ValueError(f"parts may name {known} or 0 to {len(names) - 1} (got {module!r})")

    def by_slice(self, parts: Parts) -> dict[int, LoRAFactors]:
        """Whole factors of each slice that the adapter has, with their shapes checked."""
        if not isinstance(parts, Mapping):
            # a bare tensor would be indexed by row as if it were a list (vllm #51409)
            raise ValueError(f"parts must map names to factors (got a {type(parts).__name__})")
        found: dict[int, LoRAFactors] = {}
        for module, factors in parts.items():
            members = self.slices_of(module)
            if factors is None:
                continue
            if not isinstance(factors, LoRAFactors):
                raise ValueError(f"{module} must have no axis of experts, it is a linear module")
            widths = [self.slices[index].width for index in members]
            check_shapes(module, factors, self.in_features, sum(widths))
            # the slices of a fused module share A; each takes its own rows of B
            for index, b in zip(members, torch.split(factors.b, widths), strict=True):
                if index in found:
                    raise ValueError(f"slice {self.slices[index].name} is given twice")
                found[index] = LoRAFactors(factors.a, b, factors.scale)
        return found


def stage(
    packing: Packing, cut: LayerCut, parts: Parts, *, max_rank: int, like: Tensor
) -> tuple[LoRAFactors | None, ...]:
    """A rank's factors for each slice, in the dtype and on the device of `like`. ValueError."""
    found = packing.by_slice(parts)
    pieces: dict[str, Tensor] = {}
    for index, factors in found.items():
        name = packing.slices[index].name
        if not 1 <= factors.rank <= max_rank:
            raise ValueError(f"rank of {name} must be 1 to {max_rank} (got {factors.rank})")
        check_scale(name, factors.scale)
        pieces[f"a of {name}"] = take(factors.a, cut.inputs, dim=1)
        pieces[f"b of {name}"] = take(factors.b, cut.columns[index], dim=0)
    cast = cast_all(pieces, like)
    staged: list[LoRAFactors | None] = [None] * len(packing.slices)
    for index, factors in found.items():
        name = packing.slices[index].name
        staged[index] = LoRAFactors(cast[f"a of {name}"], cast[f"b of {name}"], factors.scale)
    return tuple(staged)


def take(tensor: Tensor, shard: Shard, *, dim: int) -> Tensor:
    """The shard's live range, followed by zeros where the shard is padded."""
    piece = tensor.narrow(dim, shard.start, shard.live)
    padding = shard.size - shard.live
    if not padding:
        return piece
    behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, padding]
    return F.pad(piece, behind)


def take_experts(tensor: Tensor, experts: HeldExperts) -> Tensor:
    """A rank's part of the axis of experts: a view where they lie in a run, else a copy."""
    run = experts.run
    if run is not None:
        return tensor.narrow(0, run.start, len(run))
    return tensor[list(experts.ids)]


def owned(part: Tensor, whole: Tensor) -> Tensor:
    """`part`, copied if it is less than the whole, which may then be freed."""
    if part.numel() == whole.numel():
        return part.contiguous()
    return part.clone(memory_format=torch.contiguous_format)


def take_packed(tensor: Tensor, slices: Sequence[Slice], shards: Sequence[Shard]) -> Tensor:
    """The rows of a packed weight or bias that the shards hold, each slice cut separately; the
    tensor itself if none is cut."""
    # a rank of nothing but padding may be as wide as the whole slice
    if all(shard == whole(part.width) for part, shard in zip(slices, shards, strict=True)):
        return tensor
    pieces = torch.split(tensor, [part.width for part in slices])
    return torch.cat([take(p, s, dim=0) for p, s in zip(pieces, shards, strict=True)])


def check_shapes(module: str | int, factors: LoRAFactors, in_features: int, width: int) -> None:
    """Check the shapes of a linear module's factors. ValueError that names the module."""
    a, b = factors.a, factors.b
    if a.dim() != 2 or a.shape[1] != in_features:
        raise ValueError(f"a of {module} must be [rank, {in_features}] (got {list(a.shape)})")
    if b.shape != (width, factors.rank):
        raise ValueError(f"b of {module} must be [{width}, {factors.rank}] (got {list(b.shape)})")
