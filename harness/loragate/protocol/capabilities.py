"""What a subject supports and promises on a machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from torch import Tensor

from loragate.matrix.axis import DeclaredAxis, Unstated
from loragate.matrix.case import AXES, Case, Site
from loragate.matrix.problems import describe, nearest
from loragate.protocol.error_origin import BrokenProtocol, subject_code


class Guard(StrEnum):
    """Bad input that a subject promises to refuse: with a ValueError that names what was given,
    before anything is changed."""

    X_DTYPE = "x_dtype"
    X_WIDTH = "x_width"
    # as many rows as were prepared
    ROWS = "rows"
    # sites that work in place
    OUT_DTYPE = "out_dtype"
    OUT_WIDTH = "out_width"
    # out starts where x starts
    ALIASED_OUT = "aliased_out"
    # out starts inside of x
    OVERLAPPING_OUT = "overlapping_out"
    MAPPING_DTYPE = "mapping_dtype"
    # more rows than the instance was sized for
    MAPPING_LENGTH = "mapping_length"
    # a mapping, ids or router weights whose elements are not adjacent
    MAPPING_STRIDES = "mapping_strides"
    TOPK_STRIDES = "topk_strides"
    ROUTER_STRIDES = "router_strides"
    # a slot that does not exist, in a mapping on the host
    SLOT_RANGE = "slot_range"
    ADAPTER_RANK = "adapter_rank"
    ADAPTER_SHAPE = "adapter_shape"
    # load or unload of a slot that does not exist
    SLOT = "slot"
    # MoE sites: ids of int64, ids or weights of another shape than prepared
    TOPK_DTYPE = "topk_dtype"
    TOPK_SHAPE = "topk_shape"
    ROUTER_SHAPE = "router_shape"
    ROUTER_DTYPE = "router_dtype"
    MAP_DTYPE = "map_dtype"
    # an adapter for another number of experts
    ADAPTER_EXPERTS = "adapter_experts"


class Rounding(StrEnum):
    """A rounding to the dtype between the inputs and the one rounding of the output."""

    # the sums over in_features, with or without the scale; once
    SHRUNK = "shrunk"
    # the delta, before it is added to the base
    DELTA = "delta"


class Others(StrEnum):
    """What may change about the other rows of a batch while a row keeps its bits."""

    # their inputs, base outputs and router weights
    VALUES = "values"
    # their adapters and experts as well; the row keeps its place
    SLOTS = "slots"
    # how many they are, in a case of one plan for all batches; the row keeps its place
    COUNT = "count"


class HotPath(StrEnum):
    """What a subject promises of a step that has been warmed up."""

    # prepare never waits for the device; apply does so nowhere
    PREPARE_QUEUES = "prepare_queues"
    # apply uses the same buffers at every step, also after adapters were loaded or evicted
    SAME_BUFFERS = "same_buffers"
    # another mapping, or other adapters, need no kernel that is not compiled yet
    SAME_KERNELS = "same_kernels"
    # a graph that is captured while all rows are base rows serves batches with adapters as well
    CAPTURES_ANY_MAPPING = "captures_any_mapping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a subject supports on a machine; whatever is missing is a counted skip.

    `supports` maps axes of the matrix (the fields of `Case`) to collections of the values that
    the subject supports: `{"dtype": {Dtype.BF16}, "execution": {Execution.EAGER}, "rank":
    range(1, 513)}`. These three must be given. Of an axis that is not mentioned a subject is
    assumed to support what the axis declares: all values, or its default alone. The latter holds
    for every axis that is added later, so that no subject is run on what it does not know.

    Raises ValueError for an axis or a value that does not exist, an axis without values, or a
    missing axis.
    """

    sites: frozenset[Site]
    supports: Mapping[str, Collection[object]]
    # the same input gives the same bits from run to run
    deterministic: bool = True
    # dense_delta: a row's bits depend neither on its place in the batch nor on its slot's number
    place_invariant: bool = False
    # reads live ranks only; otherwise dead ranks must be zero
    skips_dead_ranks: bool = False
    # rows without an adapter get a delta of zero, which turns a negative zero into a zero
    adds_zero_to_base_rows: bool = False
    # live ranks may differ between the slices of one slot, each with its own scale
    rank_per_slice: bool = False
    # B holds scale * B, rounded once to the weights' dtype when an adapter is loaded; a
    # comparison in that dtype must fold as well, or it would blame the kernel for the rounding
    folds_scale_into_weights: bool = False
    # all roundings of a case that come before that of the output; None: not promised. Not judged
    # where scale * B is rounded
    roundings: Callable[[Case], Collection[Rounding]] | None = None
    # a row's bits do not depend on this about the other rows of its batch
    batch_invariant: frozenset[Others] = frozenset()
    # kernels do as much work as the live tiles of a batch need, whichever slots they use
    work_follows_tiles: bool = False
    # the floating-point memory of a slot of an instance that it opened, as views that an oracle
    # may write to; None: a slot is changed by loading only
    slot_memory: Callable[[Any, int], Sequence[Tensor]] | None = None
    guards: frozenset[Guard] = frozenset()
    # of a step that a server repeats; what is not promised is not judged
    hot_path: frozenset[HotPath] = frozenset()
    # the most bytes that apply allocates for a case beside its result; None: not promised
    allocates: Callable[[Case], int | None] | None = None
    # whether torch.compile traces apply() of a case into one graph; None: not promised
    traceable: Callable[[Case], bool] | None = None
    # a context within which the subject takes its streams from the given module, which has the
    # names of torch.cuda; None: it uses the names of torch.cuda itself. Asked without a GPU only
    streams_from: Callable[[Any], AbstractContextManager[object]] | None = None
    # kernels that load the addresses which they use: by the names of the kernel and of the argument
    # that holds the addresses, a function of the instance and of that argument which returns all
    # tensors behind it. What a kernel does without this declaration is not judged for races. The
    # argument may also be the first of several tensors in one memory, a slot or a slice
    pointer_tables: Mapping[tuple[str, str], Callable[[Any, Tensor], Sequence[Tensor]]] = field(
        default_factory=dict
    )
    # tensors of an instance that lie on the host beside a GPU, too, so that nobody waits to read
    # them; None: there are none. Asked without a GPU only, where all memory is on the host
    host_tensors: Callable[[Any], Sequence[Tensor]] | None = None
    # drops what the process keeps of earlier steps, so that the next one runs all of its source;
    # None: it keeps results of functions alone, by functools. Asked before source is traced
    forgets: Callable[[], object] | None = None
    # the reason why a case cannot run although each of its values is supported, or None
    refuses: Callable[[Case], str | None] | None = None

    def __post_init__(self) -> None:
        for name, values in self.supports.items():
            if name not in AXES:
                raise ValueError(
                    f"Capabilities.supports: "
                    f"{describe(f'unknown axis {name!r}', ', '.join(AXES), nearest(name, AXES))}"
                )
            _check_values(AXES[name], values)
        for name, axis in AXES.items():
            if axis.unstated is Unstated.ERROR and name not in self.supports:
                raise ValueError(
                    f"Capabilities.supports[{name!r}]: is missing; "
                    f"allowed: a collection of values, each of them {axis.allowed()}"
                )
        object.__setattr__(self, "supports", MappingProxyType(dict(self.supports)))


def unsupported(case: Case, have: Capabilities) -> str | None:
    """The reason why a case is skipped for a subject, or None if it runs."""
    if case.site not in have.sites:
        return f"site {case.site} is not supported"
    for name, axis in AXES.items():
        if axis.at(case.site):
            reason = _unsupported_value(axis, getattr(case, name), have.supports.get(name))
            if reason is not None:
                return reason
    return _refused(case, have.refuses) if have.refuses else None


def _refused(case: Case, refuses: Callable[[Case], str | None]) -> str | None:
    with subject_code():
        reason: object = refuses(case)
    if reason is not None and not isinstance(reason, str):
        raise BrokenProtocol(
            f"Capabilities.refuses(case) returned an object of type {type(reason).__qualname__}; "
            "expected a str with the reason, or None"
        )
    return reason


def _unsupported_value(
    axis: DeclaredAxis, value: object, supported: Collection[object] | None
) -> str | None:
    if supported is None:
        if axis.unstated is Unstated.ALL or value == axis.default:
            return None
    elif value in supported:
        return None
    elif isinstance(supported, range) and isinstance(value, int) and value > supported[-1]:
        return axis.sentence(value, f"above the limit of {supported[-1]}")
    return axis.sentence(value, "not supported")


def _check_values(axis: DeclaredAxis, values: Collection[object]) -> None:
    where = f"Capabilities.supports[{axis.name!r}]"
    if isinstance(values, str) or not isinstance(values, Collection):
        raise ValueError(f"{where}: given {values!r}; allowed: a collection of values")
    if not values:
        raise ValueError(f"{where}: given no values; allowed: {axis.allowed()}")
    if isinstance(values, range):
        # too long to look at each of them
        values = (values[0], values[-1])
    for value in values:
        if not axis.is_value(value):
            given = describe(repr(value), axis.allowed(), nearest(value, axis.members))
            raise ValueError(f"{where}: {given}")
