"""Bad input is refused, and a refusal changes nothing.

A refusal is a ValueError whose message names what was given, raised before anything is written:
tensors keep their bits, the previous mapping stays valid, a slot keeps its adapter (activation is
all or nothing), the same call is refused again, and the next valid step is right. Each subject
states which refusals it promises; accepting bad input silently gives wrong results that nobody is
warned of.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import base_of, open_loaded
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.placement import bits_of, whole
from loragate.matrix.case import Execution, Layout, Mix
from loragate.oracles.contract.violations import Violation, violations
from loragate.oracles.evidence import DEVICE_ERRORS, judge_bits, passed
from loragate.protocol import (
    AnyInstance,
    Batch,
    BrokenProtocol,
    Trial,
    apply_step,
    raised_by_subject,
)


class GuardedInput:
    name = OracleName.GUARD

    def applies(self, trial: Trial) -> str | None:
        if trial.case.execution is not Execution.EAGER:
            return "input is checked on the host, in the same way in every execution"
        if trial.case.tp * trial.case.ep > 1:
            return "input is checked before ranks are simulated, in the same way for any number"
        if not trial.case.tokens:
            return "the batch has no rows"
        if not trial.capabilities.guards:
            return "the subject promises no refusals"
        return None

    def judge(self, trial: Trial) -> Judgement:
        kind = DataKind.EXACT
        # rows of the last slot, so that damage to its adapter shows
        case = replace(trial.case, mix=Mix.RAGGED, layout=Layout.CONTIGUOUS)
        pool = make_pool(case, trial.seed, kind, trial.machine, trial.capabilities)
        batch = make_batch(case, trial.seed, 0, kind, trial.machine)
        base = base_of(trial, kind)
        instance = open_loaded(trial, case, base=base, pool=pool)
        instance.prepare(batch.token_slots)
        wanted = _apply(instance, batch)
        count = 0
        for violation in violations(trial, case, instance, batch):
            if violation.guard not in trial.capabilities.guards:
                continue
            count += 1
            wrong = (
                _refusal(violation)
                or _second_refusal(violation)
                or _aftermath(trial, violation, instance, batch, wanted)
            )
            if wrong is not None:
                return wrong
        if not count:
            reason = f"no refusal that the subject promises concerns {case.site}"
            return Judgement(self.name, Verdict.SKIP, message=reason)
        return passed(self.name, refusals=float(count))


def _refusal(violation: Violation) -> Judgement | None:
    """A FAIL if the call is not refused as promised, or changes a tensor on the way."""
    before = [bits_of(whole(tensor)).clone() for tensor in violation.watched]
    try:
        violation.call()
    except ValueError as error:
        if not _names(str(error), violation.given):
            return _failure(violation, f"the error does not name {violation.given}: {error}")
    except DEVICE_ERRORS:
        raise
    except BrokenProtocol:
        return _failure(violation, "it was accepted")
    except Exception as error:
        if not raised_by_subject(error):
            raise
        return _failure(violation, f"{type(error).__name__} instead of ValueError: {error}")
    else:
        return _failure(violation, "it was accepted")
    for tensor, bits in zip(violation.watched, before, strict=True):
        if not torch.equal(bits_of(whole(tensor)), bits):
            return _failure(violation, "it was refused after a tensor had been changed")
    return None


def _second_refusal(violation: Violation) -> Judgement | None:
    """A FAIL if the same call is not refused again: the first one may have left behind what makes
    the second one look valid."""
    again = _refusal(violation)
    return again and replace(again, message=f"{again.message}, when it was given again")


def _names(message: str, given: str) -> bool:
    """Whether `message` contains `given` as a separate word or number: "without" does not name
    out, and neither "cuda:2" nor "-2" nor "0.2" names 2."""
    own = rf"(?<![\w:-])(?<!\d\.){re.escape(given)}(?!\w|-\w|\.\d)"
    return re.search(own, message) is not None


def _aftermath(
    trial: Trial, violation: Violation, instance: AnyInstance, batch: Batch, wanted: Tensor
) -> Judgement | None:
    """A FAIL if the step that was prepared before now gives another result."""
    try:
        result = _apply(instance, batch)
    except DEVICE_ERRORS:
        raise
    except Exception as error:
        if not raised_by_subject(error):
            raise
        message = f"a valid step after it raises {type(error).__name__}: {error}"
        return _failure(violation, message, Failure.STALE_STATE)
    return judge_bits(
        trial,
        batch,
        result,
        wanted,
        oracle=OracleName.GUARD,
        failure=Failure.STALE_STATE,
        claim=f"the step before a refused call ({violation.what})",
    )


def _failure(
    violation: Violation, message: str, failure: Failure = Failure.NOT_REFUSED
) -> Judgement:
    return Judgement(
        OracleName.GUARD,
        Verdict.FAIL,
        failure,
        f"{violation.what}: {message}",
        where={"guard": violation.guard.value},
    )


def _apply(instance: AnyInstance, batch: Batch) -> Tensor:
    own = copy_batch(batch)
    # the sign of a zero sum depends on the order of its terms
    return apply_step(instance, own) + 0.0
