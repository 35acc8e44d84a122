"""What an implementation shows to the harness. Read docs/subjects.md to add your own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
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


class Guard(StrEnum):
    """Bad input that a subject promises to refuse: with a ValueError that names what was given,
    before anything is changed."""

    X_DTYPE = "x_dtype"
    X_WIDTH = "x_width"
    # as many rows as were prepared
    ROWS = "rows"
    # dense_delta only
    OUT_DTYPE = "out_dtype"
    OUT_WIDTH = "out_width"
    # out starts where x starts
    ALIASED_OUT = "aliased_out"
    # out starts inside of x
    OVERLAPPING_OUT = "overlapping_out"
    MAPPING_DTYPE = "mapping_dtype"
    # more rows than the instance was sized for
    MAPPING_LENGTH = "mapping_length"
    # a slot that does not exist, in a mapping on the host
    SLOT_RANGE = "slot_range"
    ADAPTER_RANK = "adapter_rank"
    ADAPTER_SHAPE = "adapter_shape"
    # load or unload of a slot that does not exist
    SLOT = "slot"


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
    guards: frozenset[Guard] = frozenset()
    # torch.compile traces apply() into one graph
    traceable: bool = False


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
