"""What an implementation shows to the harness. Read docs/subjects.md to add your own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loragate.machine import Machine
from loragate.matrix.case import Case, Dtype, Execution, Layout, Parallel, Site


@dataclass(frozen=True, slots=True)
class Pool:
    """The adapters that are resident in the slots, before any implementation has seen them.

    `a[slot, slice]` is [rank, in_features], `b[slice][slot]` is [slice width, rank]. Only the
    first `ranks[slot][slice]` ranks are live, the rest is dead: zero, or NaN for a subject
    that promises not to read it. Delta of a row x with slot s: `scale * (x @ A.T) @ B.T`.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    ranks: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[float, ...], ...]

    @property
    def num_slots(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `token_slots` is int32 [tokens] on the CPU, -1 for a base row.

    `out` [tokens, out_features] holds the base layer's output; an in-place site adds to it.
    """

    x: Tensor
    token_slots: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """The layer without adapters, for lora_linear: weight [out_features, in_features]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a subject supports on a machine; whatever is missing is a counted skip."""

    sites: frozenset[Site]
    dtypes: frozenset[Dtype]
    max_rank: int
    executions: frozenset[Execution]
    parallel: frozenset[Parallel] = frozenset({Parallel.REPLICATED})
    layouts: frozenset[Layout] = frozenset(Layout)
    # the same input gives the same bits from run to run
    deterministic: bool = True
    # dense_delta: a row's bits depend neither on its place in the batch nor on its slot's number
    place_invariant: bool = False
    # reads live ranks only; otherwise dead ranks must be zero
    skips_dead_ranks: bool = False
    # live ranks may differ between the slices of one slot, each with its own scale
    rank_per_slice: bool = False
    # B holds scale * B, rounded once to the weights' dtype when an adapter is loaded; a
    # comparison in that dtype must fold as well, or it blames the kernel for that rounding
    folds_scale_into_weights: bool = False


class Instance(Protocol):
    """One resident pool of adapters; its state lives from step to step like in a server."""

    def load(self, slot: int, pool: Pool) -> None:
        """Put adapter `slot` of `pool` into the same slot here, replacing what was there."""

    def unload(self, slot: int) -> None:
        """Empty a slot."""

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step: tell which row uses which slot. May sync, is never captured."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        """The operation itself. dense_delta adds to `out` in place and returns it;
        lora_linear ignores `out` and returns a new tensor. Never syncs."""


class Subject(Protocol):
    name: str

    def version(self) -> str:
        """Version of the implementation, for the report."""

    def capabilities(self, machine: Machine) -> Capabilities | str:
        """What it can do here, or a sentence that says why it can do nothing."""

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        """A fresh instance with empty slots, sized for the case; `base` for lora_linear."""


def unsupported(case: Case, have: Capabilities) -> str | None:
    """The reason why a case is skipped for a subject, or None if it runs."""
    wants: Sequence[tuple[str, object, frozenset[object]]] = (
        ("site", case.site, frozenset(have.sites)),
        ("dtype", case.dtype, frozenset(have.dtypes)),
        ("execution", case.execution, frozenset(have.executions)),
        ("parallel", case.parallel, frozenset(have.parallel)),
        ("layout", case.layout, frozenset(have.layouts)),
    )
    for axis, wanted, supported in wants:
        if wanted not in supported:
            return f"{axis} {wanted} is not supported"
    if case.rank > have.max_rank:
        return f"rank {case.rank} is above the limit of {have.max_rank}"
    return None
