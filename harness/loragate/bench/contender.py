"""The subjects that are timed, and the check of their results before they are timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import ExitCode
from loragate.matrix.case import Case, Dtype
from loragate.oracles.numeric.golden import chunks, eager, golden
from loragate.protocol import (
    AnyInstance,
    BaseLayer,
    Batch,
    Capabilities,
    Pool,
    Subject,
    unsupported,
)
from loragate.subjects import find_subject

# a subject may round more often than the plain computation; a wrong one is off by far more
MAX_ERROR_RATIO = 2.0


class WrongResult(Exception):
    """A subject computes a wrong result, so that its time would mean nothing."""


class Unavailable(Exception):
    """The subject does not exist, or it does not run here."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Contender:
    """A subject that runs here, and its capabilities."""

    subject: Subject
    have: Capabilities

    def open(self, case: Case, machine: Machine, pool: Pool) -> AnyInstance:
        # not through the boundary of the oracles, which would be timed as well
        instance = self.subject.open(case, machine, None)
        for slot in range(pool.num_slots):
            instance.load(slot, pool)
        return instance

    def require(self, case: Case) -> None:
        """Raises Unavailable for a case that the subject cannot take."""
        reason = unsupported(case, self.have)
        if reason is not None:
            raise Unavailable(f"{self.subject.name}: {reason}", ExitCode.INFRASTRUCTURE)


def find_contender(name: str) -> Contender:
    """Raises Unavailable."""
    try:
        subject = find_subject(name)
    except (ValueError, ImportError) as error:
        raise Unavailable(str(error), ExitCode.USAGE) from error
    have = subject.capabilities(detect_machine())
    if isinstance(have, str):
        raise Unavailable(f"{name}: {have}", ExitCode.INFRASTRUCTURE)
    return Contender(subject, have)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """fp64 results in chunks of rows, and the sum of squared errors of a plain computation in
    `dtype`."""

    right: tuple[tuple[slice, Tensor], ...]
    plain_error: float
    dtype: Dtype

    @classmethod
    def of_step(cls, case: Case, pool: Pool, batch: Batch, base: BaseLayer | None = None) -> Self:
        """`batch.out` is what the delta is added to, if there is no `base` whose output it is."""
        pieces = list(chunks(batch))
        right = tuple((rows, golden(pool, piece, base).out) for rows, piece in pieces)
        plain = [(right_rows, eager(case, pool, piece, base)) for right_rows, piece in pieces]
        return cls(right, _squares(right, plain), case.dtype)

    @classmethod
    def of_results(cls, right: Tensor, plain: Tensor, dtype: Dtype) -> Self:
        everything = slice(0, len(right))
        pieces = ((everything, right),)
        return cls(pieces, _squares(pieces, [(everything, plain)]), dtype)

    def check(self, who: str, where: str, result: Tensor) -> float:
        """rms error of `result` over that of the plain computation. Raises WrongResult."""
        parts = [(rows, result[rows]) for rows, _ in self.right]
        ratio = float((_squares(self.right, parts) / self.plain_error) ** 0.5)
        if not ratio <= MAX_ERROR_RATIO:
            raise WrongResult(
                f"{who} at {where}: its error is {ratio:.1f} times that of a plain "
                f"computation in {self.dtype}; allowed: at most {MAX_ERROR_RATIO}"
            )
        return ratio


def _squares(right: Iterable[tuple[slice, Tensor]], found: Iterable[tuple[slice, Tensor]]) -> float:
    pairs = zip(right, found, strict=True)
    return sum(float((got.double() - true).square().sum()) for (_, true), (_, got) in pairs)
