"""The same inputs twice in one process, and the digest of each result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import Session, inputs_of
from loragate.execution.streams.delays import chosen_places, delayed
from loragate.inputs import DataKind, copy_batch
from loragate.oracles.evidence import passed
from loragate.protocol import Trial

_STEPS = 2


class Bits:
    """As the oracle `repeat`, at a fraction of its time, and with digests that other processes can
    be compared with. For one trial."""

    name = OracleName.REPEAT

    def __init__(
        self,
        *,
        tracing: Callable[[], AbstractContextManager[object]] = nullcontext,
        filling: Callable[[], AbstractContextManager[object]] = nullcontext,
        is_delayed: bool = False,
    ) -> None:
        """tracing: around the first step. filling: around all that the subject does, but not around
        the making of its inputs. is_delayed: whether a stream is late at one place of each step."""
        self.digests: tuple[str, ...] = ()
        self._tracing, self._filling, self._is_delayed = tracing, filling, is_delayed

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        digests: list[str] = []
        with self._filling():
            session = Session(trial, base, pool)
            for number in range(_STEPS):
                # a subject that draws random numbers must draw the same ones
                torch.manual_seed(trial.seed)
                with nullcontext() if number else self._tracing():
                    result = self._step(trial, lambda: session.step(copy_batch(batch)))
                digests.append(digest_of(result))
        self.digests = tuple(digests)
        if len(set(digests)) == 1:
            return passed(self.name, runs=float(_STEPS))
        return Judgement(
            self.name,
            Verdict.FAIL,
            Failure.NONDETERMINISTIC,
            "the second run of the same inputs has other bits than the first",
        )

    def _step(self, trial: Trial, step: Callable[[], Tensor]) -> Tensor:
        if not self._is_delayed or trial.machine.device != "cuda":
            return step()
        with delayed() as places:
            step()
        for place in chosen_places(places.passed, limit=1, seed=trial.seed):
            with delayed(place):
                return step()
        return step()


def digest_of(result: Tensor) -> str:
    """32 hexadecimal digits of the bits of a tensor of any shape, dtype and strides."""
    data = result.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
