"""The bits of a row do not depend on the rest of its batch, as far as the subject promises it.

Half of the tokens stay as they are, in their places; the others get new and larger values, and
then other adapters and experts, each only where it is promised. The tokens that stayed must keep
their bits on data that rounds. The size of the batch stays the same: plans may depend on it.

In a case of one plan for all batches, the first rows are also computed without those behind them,
in ever smaller batches down to one row, where that is promised. Without a GPU equal bits prove
little of this, since numpy adds up alike where other instructions of a GPU would not. There,
kernels of floating-point operands must be the same as well: names, constants and options.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import Session, inputs_of
from loragate.execution.specialisations import HostLaunch, noted_launches
from loragate.inputs import DataKind, copy_batch, make_batch
from loragate.inputs.batch import rows_of
from loragate.inputs.draw import number
from loragate.matrix.case import Plans
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Others, Pool, Trial

_KEPT = 2
_LARGER = 8.0
_FEWER = 4
# its name and its constants
Kernel = tuple[str, tuple[tuple[str, str], ...]]
_CLAIMS = {
    Others.VALUES: "the same rows beside rows with other values",
    Others.SLOTS: "the same rows beside rows with other adapters",
    Others.COUNT: "the same rows beside fewer rows",
}


class BatchInvariance:
    name = OracleName.BATCH_INVARIANCE

    def applies(self, trial: Trial) -> str | None:
        if not trial.capabilities.batch_invariant:
            return "the subject does not promise that a row does not depend on its batch"
        return None if trial.case.tokens > 1 else "the batch has no other rows"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        session = Session(trial, base, pool)
        first = session.step(copy_batch(batch)).clone()
        kept = _kept(trial, batch)
        rows = rows_of(kept, len(first) // trial.case.tokens).to(first.device)
        for others, changed in _changed(trial, batch, kept):
            wanted = session.step(copy_batch(changed)).clone()
            result = wanted.clone()
            result[rows] = first[rows]
            wrong = judge_bits(
                trial,
                batch,
                result,
                wanted,
                oracle=self.name,
                failure=Failure.BATCH_DEPENDENT,
                claim=_CLAIMS[others],
            )
            if wrong is not None:
                return wrong
        wrong = _of_fewer_rows(trial, batch, pool, base)
        return wrong or passed(self.name, rows=float(len(rows)))


def _of_fewer_rows(
    trial: Trial, batch: Batch, pool: Pool, base: BaseLayer | None
) -> Judgement | None:
    """A FAIL if the first rows differ in a smaller batch, or are computed by other kernels."""
    promised = Others.COUNT in trial.capabilities.batch_invariant
    if not promised or trial.case.plans is not Plans.ONE:
        return None
    # every smaller batch has an adapter: without one, the kernels of adapters need not run
    slots = batch.token_slots.clone()
    slots[0] = trial.case.slots - 1
    batch = replace(batch, token_slots=slots)
    whole, kernels = _computed(trial, batch, pool, base)
    tokens = trial.case.tokens
    while tokens > 1:
        tokens = max(1, tokens // _FEWER)
        fewer = _first_tokens(batch, tokens)
        smaller = replace(trial, case=replace(trial.case, tokens=tokens))
        result, found = _computed(smaller, fewer, pool, base)
        claim = f"{_CLAIMS[Others.COUNT]} ({tokens} of {trial.case.tokens})"
        wrong = _other_kernel(kernels, found, claim) or judge_bits(
            smaller,
            fewer,
            whole[: len(result)],
            result,
            oracle=OracleName.BATCH_INVARIANCE,
            failure=Failure.BATCH_DEPENDENT,
            claim=claim,
        )
        if wrong is not None:
            return wrong
    return None


def _computed(
    trial: Trial, batch: Batch, pool: Pool, base: BaseLayer | None
) -> tuple[Tensor, list[Kernel]]:
    """The output of a batch on a fresh instance, and the kernels of floating-point operands that
    computed it, each once; none where no interpreter shows them."""
    session, kernels = Session(trial, base, pool), []

    def note(launch: HostLaunch) -> None:
        if any(tensor.is_floating_point() for _, tensor in launch.tensors):
            # what is a tuple describes sizes and addresses, which change nothing of an order
            constants = sorted(
                (name, value)
                for name, value in launch.compiled_for.items()
                if isinstance(value, str)
            )
            kernels.append((launch.kernel, tuple(constants)))

    noted = noted_launches(note, lambda launch: launch()) if trial.machine.interpreted else None
    with noted or nullcontext():
        result = session.step(copy_batch(batch)).clone()
    return result, list(dict.fromkeys(kernels))


def _other_kernel(whole: list[Kernel], fewer: list[Kernel], claim: str) -> Judgement | None:
    for first, second in zip_longest(whole, fewer):
        if first != second:
            shown = " and ".join(
                _shown(one, other) for one, other in ((first, second), (second, first))
            )
            message = f"other kernels compute {claim}: {shown}"
            return Judgement(
                OracleName.BATCH_INVARIANCE, Verdict.FAIL, Failure.BATCH_DEPENDENT, message
            )
    return None


def _shown(kernel: Kernel | None, other: Kernel | None) -> str:
    """A kernel, with the constants that the other one does not have."""
    if kernel is None:
        return "none"
    name, constants = kernel
    own = [
        f"{key}={value}" for key, value in constants if not other or (key, value) not in other[1]
    ]
    return f"{name}({', '.join(own)})"


def _first_tokens(batch: Batch, tokens: int) -> Batch:
    """The batch of the first tokens alone."""
    whole = len(batch.token_slots)

    def first(values: Tensor) -> Tensor:
        # a token may have several rows; strides stay as they are
        return values[: tokens * (len(values) // whole)]

    routes = batch.routes
    if routes is not None:
        weights = None if routes.weights is None else first(routes.weights)
        routes = replace(routes, topk_ids=first(routes.topk_ids), weights=weights)
    slots = first(batch.token_slots)
    return replace(batch, x=first(batch.x), out=first(batch.out), token_slots=slots, routes=routes)


def _kept(trial: Trial, batch: Batch) -> Tensor:
    """int64: the tokens that stay, one with an adapter among them where there is one."""
    rng = random.Random(number(trial.seed, "kept"))
    served = (batch.token_slots >= 0).nonzero().flatten().tolist()
    tokens = rng.sample(range(trial.case.tokens), max(1, trial.case.tokens // _KEPT))
    if served:
        tokens[0] = rng.choice(served)
    return torch.tensor(sorted(set(tokens)))


def _changed(trial: Trial, batch: Batch, kept: Tensor) -> Iterator[tuple[Others, Batch]]:
    other = make_batch(trial.case, trial.seed, 1, DataKind.SIGNED, trial.machine)
    if Others.VALUES in trial.capabilities.batch_invariant:
        same = replace(copy_batch(other), token_slots=batch.token_slots.clone())
        # the largest number of the batch, of a tile and of a column must not be one that stays
        if same.x.is_floating_point():
            same.x.mul_(_LARGER)
        same.out.mul_(_LARGER)
        if other.routes is not None and batch.routes is not None:
            same = replace(same, routes=replace(other.routes, topk_ids=batch.routes.topk_ids))
        yield Others.VALUES, _with_kept(same, batch, kept)
    if Others.SLOTS in trial.capabilities.batch_invariant:
        yield Others.SLOTS, _with_kept(other, batch, kept)


def _with_kept(other: Batch, batch: Batch, kept: Tensor) -> Batch:
    """`other`, with the kept tokens of `batch` in their places."""
    result = copy_batch(other)
    pairs = [(result.x, batch.x), (result.out, batch.out), (result.token_slots, batch.token_slots)]
    if result.routes is not None and batch.routes is not None:
        pairs.append((result.routes.topk_ids, batch.routes.topk_ids))
        if result.routes.weights is not None and batch.routes.weights is not None:
            pairs.append((result.routes.weights, batch.routes.weights))
    for target, source in pairs:
        rows = rows_of(kept, len(source) // len(batch.token_slots)).to(source.device)
        target[rows] = source[rows]
    return result
