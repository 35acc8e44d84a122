"""From the modules of an adapter to the factors that one rank of a MoE layer holds.

Invariant: the result is complete, checked and independent of the input: a rank's part is cut from
the whole factors every time, and either every expert has factors for a projection or none has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.adapters.errors import hint, listing
from lorakernels.common.stacked_weights import check_scale
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.casting import cast_all
from lorakernels.layers.gate_up import GateUp, gate_and_up
from lorakernels.layers.moe_partition import HeldExperts, MoECut
from lorakernels.layers.packing import check_shapes, take, take_experts
from lorakernels.layers.partition import Shard
from lorakernels.moe.weights import ExpertFactors, Factors

GATE_UP = "gate_up_proj"
ExpertParts = Mapping[str, Factors | None]


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """The projections of a layer in the order of its slices. The last one maps the intermediate to
    the hidden size, the others map the hidden to the intermediate size. `gate_up` is None without a
    gate."""

    projections: tuple[str, ...]
    num_experts: int
    hidden: int
    intermediate: int
    gate_up: GateUp | None

    def homes(self) -> dict[str, tuple[int | None, tuple[int, ...]]]:
        """For each name that an adapter may use: its expert, None for all of them, and the indices
        of the slices that it covers."""
        homes: dict[str, tuple[int | None, tuple[int, ...]]] = {
            f"experts.{projection}": (None, (index,))
            for index, projection in enumerate(self.projections)
        }
        if len(self.projections) == 3:
            homes[f"experts.{GATE_UP}"] = (None, (0, 1))
        for expert in range(self.num_experts):
            for index, projection in enumerate(self.projections):
                homes[f"experts.{expert}.{projection}"] = (expert, (index,))
        return homes

    def halves(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows [experts, 2 * intermediate, ..] of gate and of up, or those of up alone; views."""
        return (rows,) if self.gate_up is None else gate_and_up(rows, self.gate_up)

    def by_slice(
        self, parts: ExpertParts, held: HeldExperts, *, shared_outer: bool
    ) -> dict[int, ExpertFactors]:
        """Checked factors of the `held` experts for each slice that the adapter has, as wide as the
        whole layer. An expert axis of 1 stays 1. With `shared_outer` all experts must share the
        outer factor. Raises ValueError."""
        found: dict[int, ExpertFactors] = {}
        single: dict[int, dict[int, LoRAFactors]] = {}
        homes = self.homes()
        if not isinstance(parts, Mapping):
            raise ValueError(f"parts must map names to factors (got a {type(parts).__name__})")
        for name, factors in parts.items():
            if name not in homes:
                allowed = ", ".join(self.projections)
                raise ValueError(
                    f"parts may name experts.PROJECTION or experts.NUMBER.PROJECTION, with one of "
                    f"{allowed} (got {name!r}{hint(name, homes)})"
                )
            expert, members = homes[name]
            if factors is None:
                continue
            if expert is not None:
                single.setdefault(members[0], {})[expert] = _flat(name, factors)
                continue
            stacked = self._stacked(name, factors, members)
            for index, piece in zip(members, self._split(stacked, members, held), strict=True):
                self._refuse_twice(index, found)
                found[index] = piece
                if shared_outer:
                    self._check_outer(index, stacked.a.shape[0], stacked.b.shape[0])
        for index, by_expert in single.items():
            self._refuse_twice(index, found)
            found[index] = self._stack(index, by_expert, held)
            if shared_outer:
                self._check_outer(index, len(by_expert), len(by_expert))
        return found

    def ends(self, index: int) -> tuple[int, int]:
        """Input and output features of a slice."""
        down = index == len(self.projections) - 1
        return (self.intermediate, self.hidden) if down else (self.hidden, self.intermediate)

    def _check_outer(self, index: int, experts_of_a: int, experts_of_b: int) -> None:
        # of the whole factors: a rank that holds one expert must refuse what other ranks refuse
        down = index == len(self.projections) - 1
        side, experts = ("b", experts_of_b) if down else ("a", experts_of_a)
        if experts != 1:
            name = self.projections[index]
            raise ValueError(f"{side} of {name} must be shared by all experts, as in this layer")

    def _refuse_twice(self, index: int, found: Mapping[int, ExpertFactors]) -> None:
        if index in found:
            raise ValueError(f"{self.projections[index]} of the experts is given twice")

    def _stacked(self, name: str, factors: Factors, members: tuple[int, ...]) -> ExpertFactors:
        if not isinstance(factors, ExpertFactors):
            raise ValueError(f"factors of {name} must have an axis of experts")
        inputs, width = self.ends(members[0])[0], sum(self.ends(index)[1] for index in members)
        rank = factors.a.shape[1] if factors.a.dim() == 3 else -1
        for side, tensor, shape, named in (
            ("a", factors.a, (rank, inputs), f"rank, {inputs}"),
            ("b", factors.b, (width, rank), f"{width}, {rank}"),
        ):
            if tensor.shape[1:] != shape or tensor.shape[0] not in (1, self.num_experts):
                raise ValueError(
                    f"{side} of {name} must be [{self.num_experts} or 1, {named}] "
                    f"(got {list(tensor.shape)})"
                )
        return factors

    def _split(
        self, factors: ExpertFactors, members: tuple[int, ...], held: HeldExperts
    ) -> list[ExpertFactors]:
        a, b = (_held(side, held) for side in (factors.a, factors.b))
        # gate and up share A; each takes its own rows of B
        pieces = self.halves(b) if len(members) == 2 else (b,)
        return [ExpertFactors(a, piece, factors.scale) for piece in pieces]

    def _stack(
        self, index: int, by_expert: Mapping[int, LoRAFactors], held: HeldExperts
    ) -> ExpertFactors:
        projection, (inputs, width) = self.projections[index], self.ends(index)
        missing = [e for e in range(self.num_experts) if e not in by_expert]
        if missing:
            names = listing([f"experts.{expert}.{projection}" for expert in missing])
            raise ValueError(
                f"{projection} must have factors for all {self.num_experts} experts or for none "
                f"(missing {len(missing)}: {names})"
            )
        first = by_expert[0]
        for expert, factors in by_expert.items():
            name = f"experts.{expert}.{projection}"
            check_shapes(name, factors, inputs, width)
            # a slot has one rank and one scale for all experts of a projection
            if (factors.rank, factors.scale) != (first.rank, first.scale):
                raise ValueError(
                    f"{projection} must have one rank and one scale for all experts "
                    f"(got {first.rank} and {first.scale} for experts.0.{projection}, "
                    f"{factors.rank} and {factors.scale} for {name})"
                )
        experts = [by_expert[expert] for expert in held.ids]
        if self.num_experts == 1:
            # in all its places one factor, which may be one that a layer keeps once
            experts = experts[:1]
        return ExpertFactors(
            torch.stack([factors.a for factors in experts]),
            torch.stack([factors.b for factors in experts]),
            first.scale,
        )


def stage_experts(
    packing: ExpertPacking,
    cut: MoECut,
    parts: ExpertParts,
    *,
    max_rank: int,
    like: Tensor,
    shared_outer: bool,
    down_columns: Shard,
) -> tuple[ExpertFactors | None, ...]:
    """A rank's factors for each slice, in the dtype and on the device of `like`. With
    `shared_outer` the outer factor of each slice has an axis of 1. `down_columns`: of B of down,
    all of them unless it is sharded by rank. ValueError."""
    found = packing.by_slice(parts, cut.experts, shared_outer=shared_outer)
    pieces: dict[str, Tensor] = {}
    for index, factors in found.items():
        name, down = packing.projections[index], index == len(packing.projections) - 1
        if not 1 <= factors.rank <= max_rank:
            raise ValueError(f"rank of {name} must be 1 to {max_rank} (got {factors.rank})")
        check_scale(name, factors.scale)
        a, b = factors.a, factors.b
        pieces[f"a of {name}"] = take(a, cut.intermediate, dim=2) if down else a
        if down:
            b = take(b, down_columns, dim=1)
        pieces[f"b of {name}"] = b if down else take(b, cut.intermediate, dim=1)
    cast = cast_all(pieces, like)
    staged: list[ExpertFactors | None] = [None] * len(packing.projections)
    for index, factors in found.items():
        name = packing.projections[index]
        staged[index] = ExpertFactors(cast[f"a of {name}"], cast[f"b of {name}"], factors.scale)
    return tuple(staged)


def _flat(name: str, factors: Factors) -> LoRAFactors:
    if not isinstance(factors, LoRAFactors):
        raise ValueError(f"factors of {name} must have no axis of experts")
    return factors


def _held(factor: Tensor, held: HeldExperts) -> Tensor:
    # one that all experts share, or that of the only expert, is the same in all places
    return take_experts(factor, held) if factor.shape[0] > 1 else factor
