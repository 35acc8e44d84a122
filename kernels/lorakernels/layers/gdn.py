"""The input projection of a gated delta net (Qwen3-Next, Qwen3.5) that serves many adapters at
once: two linear layers of one input, qkvz and ba.

Invariant: as in layers/linear.py, the layer is built and loaded from whole tensors and copies its
own part of them. Each head's columns stay together, and each kind of columns is cut separately:
there are more value heads than key heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.quantised import Quantised
from lorakernels.common.stacked_weights import check_scale
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.gdn.forms import GDNForm
from lorakernels.gdn.ops import gdn_in_proj
from lorakernels.layers.casting import cast_all
from lorakernels.layers.gdn_weights import check_weights, input_dtype, joined, take_rows
from lorakernels.layers.moe_weights import Weight, values_of
from lorakernels.layers.packing import check_shapes, take_packed
from lorakernels.layers.partition import Parallel, Shard, Slice, cut_layer
from lorakernels.moe.weights import Factors
from lorakernels.runtime.device import keep_address


@dataclass(frozen=True, slots=True)
class InputModule:
    """A module that an adapter may have factors for, and the kinds of columns in it. They share the
    A and the rank of the module; each of them is cut by its own heads."""

    name: str
    columns: tuple[Slice, ...]

    @property
    def width(self) -> int:
        return sum(part.width for part in self.columns)


@dataclass(frozen=True, slots=True)
class InputModules:
    """The modules of qkvz and those of ba, each in the order of its columns."""

    qkvz: tuple[InputModule, ...]
    ba: tuple[InputModule, ...]

    @property
    def all(self) -> tuple[InputModule, ...]:
        return self.qkvz + self.ba


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetHeads:
    """The heads of a model, and the columns of each. Several value heads share a key head.

    Raises ValueError.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_size", "value_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of the {self.key_heads} key heads "
                f"(got {self.value_heads})"
            )

    def grouped(self) -> InputModules:
        """Qwen3-Next: in_proj_qkvz and in_proj_ba, where the columns of a key head, and of all
        value heads that share it, stand together."""
        qkvz = 2 * self._keys + 2 * self._values
        return InputModules(
            (_module("in_proj_qkvz", (qkvz, self.key_heads)),),
            (_module("in_proj_ba", (2 * self.value_heads, self.key_heads)),),
        )

    def separate(self) -> InputModules:
        """Qwen3.5: in_proj_qkv and in_proj_z, in_proj_b and in_proj_a, each kind of columns after
        the other."""
        keys, values = (self._keys, self.key_heads), (self._values, self.value_heads)
        scalars = (self.value_heads, self.value_heads)
        return InputModules(
            (_module("in_proj_qkv", keys, keys, values), _module("in_proj_z", values)),
            (_module("in_proj_b", scalars), _module("in_proj_a", scalars)),
        )

    @property
    def _keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_size


class GatedDeltaNetInputProjection(nn.Module):
    """(qkvz, ba) = x @ Wqkvz.T and x @ Wba.T, each plus scale * (x @ A.T) @ B.T with A, B and scale
    of each row's slot; an adapter may have factors for either or for both.

    qkvz [columns of its modules, in_features] and ba likewise are the weights of the whole layer,
    of which a rank keeps its heads. There is no bias. Either may be quantised: values
    float8_e4m3fn, and one scale fp32, or one for each row; its product then quantises the input as
    well. Adapters always take the input as it is. `dtype` is that of the input and the adapters,
    and must be given where both weights are quantised. Raises ValueError.
    """

    def __init__(
        self,
        qkvz: Weight,
        ba: Weight,
        *,
        modules: InputModules,
        num_slots: int,
        rank: int,
        dtype: torch.dtype | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
    ) -> None:
        super().__init__()
        self.modules_of_input = modules
        _check_modules(modules)
        check_weights({"qkvz": (qkvz, _width(modules.qkvz)), "ba": (ba, _width(modules.ba))})
        self.dtype = input_dtype([qkvz, ba], dtype)
        self.in_features = values_of(qkvz).shape[1]
        self._shards = {
            module.name: _cut(module, self.in_features, tp_size, tp_rank) for module in modules.all
        }
        first, second = self._local(qkvz, modules.qkvz), self._local(ba, modules.ba)
        self.qkvz_features, self.ba_features = len(values_of(first)), len(values_of(second))
        # one tensor for all forms where that is possible: each of the products reads its rows, or
        # one product reads all
        base, *apart = joined(first, second)
        # no ParameterList: torch.compile of torch 2.11 cannot iterate over one
        self.weight = nn.Parameter(values_of(base), requires_grad=False)
        self.ba_weight = nn.Parameter(values_of(apart[0]), requires_grad=False) if apart else None
        self.scales = [_scales(weight) for weight in (base, *apart)]
        self.slots = SlotWeights(
            num_slots=num_slots,
            slice_widths=[
                sum(shard.size for shard in self._shards[module.name]) for module in modules.all
            ],
            in_features=self.in_features,
            rank=rank,
            dtype=self.dtype,
            device=self.weight.device,
        )

    @property
    def weights(self) -> list[Tensor]:
        """One weight with the columns of both, or those of qkvz and those of ba."""
        return [self.weight] if self.ba_weight is None else [self.weight, self.ba_weight]

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The modules that an adapter may have factors for, each a slice of its own."""
        return {module.name: (i,) for i, module in enumerate(self.modules_of_input.all)}

    def forward(
        self,
        x: Tensor,
        metadata: BatchMetadata,
        workspace: DenseWorkspace,
        *,
        form: GDNForm | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [.., in_features] -> qkvz [.., its local columns] and ba [.., its local columns], with
        as many rows as `metadata` was prepared for. Both are columns of one tensor and as such not
        contiguous. `workspace` is made for `slots`, and may be shared by layers that run one
        after the other. `form`: how the products are computed; None lets the plan choose. One
        product of all columns is impossible where one weight is quantised and the other is not.
        The results have no gradient. Raises ValueError."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x must have {self.in_features} columns (got {x.shape[-1]})")
        rows = x.reshape(-1, self.in_features)
        out = gdn_in_proj(
            rows,
            self.weights,
            self.scales,
            self.qkvz_features,
            self.slots,
            metadata,
            workspace,
            form=form,
        )
        out = out.view(*x.shape[:-1], out.shape[1])
        return out[..., : self.qkvz_features], out[..., self.qkvz_features :]

    def load_adapter(self, slot: int, parts: Mapping[str, Factors | None]) -> None:
        """Put an adapter into a slot, all or nothing. `parts` maps names of modules to whole
        factors; a module that it does not name gets none. ValueError."""
        self.commit(slot, self.stage(parts))

    def unload(self, slot: int) -> None:
        """Empty a slot; its rows then get no delta. ValueError."""
        self.slots.reset(slot)

    def stage(self, parts: Mapping[str, Factors | None]) -> tuple[LoRAFactors | None, ...]:
        """This rank's part of an adapter, checked, as `commit` takes it. ValueError."""
        found = self._checked(parts)
        pieces: dict[str, Tensor] = {}
        for module in self.modules_of_input.all:
            if module.name in found:
                factors = found[module.name]
                local = take_packed(factors.b, module.columns, self._shards[module.name])
                pieces[f"a of {module.name}"], pieces[f"b of {module.name}"] = factors.a, local
        cast = cast_all(pieces, self.slots.a)
        return tuple(
            LoRAFactors(cast[f"a of {name}"], cast[f"b of {name}"], found[name].scale)
            if name in found
            else None
            for name in self.parts
        )

    def commit(self, slot: int, staged: Sequence[LoRAFactors | None]) -> None:
        """Empty a slot and load a staged adapter into it. ValueError."""
        self.slots.load(slot, staged)

    def _checked(self, parts: Mapping[str, Factors | None]) -> dict[str, LoRAFactors]:
        if not isinstance(parts, Mapping):
            raise ValueError(f"parts must map names to factors (got a {type(parts).__name__})")
        modules = {module.name: module for module in self.modules_of_input.all}
        found: dict[str, LoRAFactors] = {}
        for name, factors in parts.items():
            if name not in modules:
                raise ValueError(f"parts may name {', '.join(modules)} (got {name!r})")
            if factors is None:
                continue
            if not isinstance(factors, LoRAFactors):
                raise ValueError(f"{name} must have no axis of experts, it is a linear module")
            check_shapes(name, factors, self.in_features, modules[name].width)
            if not 1 <= factors.rank <= self.slots.rank:
                raise ValueError(
                    f"rank of {name} must be 1 to {self.slots.rank} (got {factors.rank})"
                )
            check_scale(name, factors.scale)
            found[name] = factors
        return found

    def _local(self, weight: Weight, group: Sequence[InputModule]) -> Weight:
        slices = [part for module in group for part in module.columns]
        shards = [shard for module in group for shard in self._shards[module.name]]
        return take_rows(weight, slices, shards)


def _module(name: str, *columns: tuple[int, int]) -> InputModule:
    """A module of columns given by their width and their heads."""
    slices = (Slice(f"{name}.{i}", width, heads) for i, (width, heads) in enumerate(columns))
    return InputModule(name, tuple(slices))


def _cut(module: InputModule, in_features: int, tp_size: int, tp_rank: int) -> tuple[Shard, ...]:
    cut = cut_layer(
        module.columns, in_features, parallel=Parallel.COLUMN, tp_size=tp_size, tp_rank=tp_rank
    )
    return cut.columns


def _check_modules(modules: InputModules) -> None:
    names = [module.name for module in modules.all]
    if not modules.qkvz or not modules.ba:
        raise ValueError("modules must name at least one of qkvz and one of ba")
    if len(set(names)) != len(names):
        raise ValueError(f"modules must have different names (got {', '.join(names)})")


def _width(group: Sequence[InputModule]) -> int:
    return sum(module.width for module in group)


def _scales(weight: Weight) -> Tensor | None:
    return keep_address(weight.scales) if isinstance(weight, Quantised) else None
