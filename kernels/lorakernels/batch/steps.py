"""What is known of a prepared step, by one of the tensors of its mapping: `tile_rows` of
BatchMetadata, `step` of PairMetadata.

An operator gets tensors alone, since a number beside them would become a constant of a traced
graph. It looks up here what it must know, when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.runtime.options import batch_invariant, check_batch_invariant
from lorakernels.runtime.streams import is_capturing


@dataclass(slots=True, eq=False)
class BaseRows:
    """A step of which the host knows that all its rows are base rows. `is_declared` is true where
    the caller has declared that, so that it also holds for what is captured meanwhile; when that
    is over, nothing is known any more."""

    is_declared: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class PreparedStep:
    """The step that a mapping is prepared for: its rows, None before the first one, what the host
    knows of them if all are base rows, and what its tables are laid out for: the option, and the
    height of tiles, None for one that follows from the rows."""

    num_rows: int | None = None
    height: int | None = None
    base_rows: BaseRows | None = None
    is_invariant: bool | None = None


# of a tensor, which keeps its record in it: every launch asks, and a table of tensors, which
# compares them by identity in Python, takes ten times as long
_ATTRIBUTE = "_lorakernels_step"


def step_of(tensor: Tensor) -> PreparedStep:
    """The record of the mapping with this tensor, which is the same one for all of its steps."""
    step = _known_step(tensor)
    if step is None:
        step = PreparedStep()
        setattr(tensor, _ATTRIBUTE, step)
    return step


def _known_step(tensor: Tensor) -> PreparedStep | None:
    step: PreparedStep | None = vars(tensor).get(_ATTRIBUTE)
    return step


def prepared_rows(tensor: Tensor) -> int | None:
    """The rows of the step that the mapping with this tensor was prepared for; None where that is
    not known, such as for the copy that a CUDA graph of torch.compile reads."""
    step = _known_step(tensor)
    return None if step is None else step.num_rows


def fixed_height(tensor: Tensor) -> int | None:
    """The height of the tiles of the mapping with this tensor; None where it follows from its
    rows."""
    step = _known_step(tensor)
    return None if step is None else step.height


def check_option(tensor: Tensor) -> None:
    """ValueError where the mapping with this tensor is laid out for another value of
    LORAKERNELS_BATCH_INVARIANT than the process has now."""
    step = _known_step(tensor)
    if step is not None and step.is_invariant is not None:
        check_batch_invariant(step.is_invariant, batch_invariant())


def note_rows(tensor: Tensor, num_rows: int) -> None:
    """The mapping with this tensor is prepared for so many rows."""
    step_of(tensor).num_rows = num_rows


def base_rows(tensor: Tensor) -> BaseRows | None:
    """The step of the mapping with this tensor, if the host knows that it has base rows alone."""
    step = _known_step(tensor)
    return None if step is None else step.base_rows


def hand_on_base_rows(batch: Tensor, pairs: Tensor, device: torch.device) -> None:
    """The pairs with the tensor `pairs` belong to the step of the mapping with the tensor `batch`.

    A replay hands nothing on: of what is captured, only a declaration is known of the pairs.
    """
    known = base_rows(batch)
    if known is not None and not known.is_declared and is_capturing(device):
        known = None
    step_of(pairs).base_rows = known


def runs_adapters(tensor: Tensor, device: torch.device) -> bool:
    """Whether an operator launches the kernels of the adapters for the step that the mapping with
    this tensor was prepared for.

    A CUDA graph serves other batches than the one of its capture: what is captured lacks these
    kernels only where that was declared, and never because of the rows that the mapping had.
    """
    known = base_rows(tensor)
    if known is None or known.is_over:
        return True
    return not known.is_declared and is_capturing(device)
