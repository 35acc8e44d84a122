"""A step reads nothing late: the host may be many steps ahead of the device.

Several steps with different mappings are queued behind a busy device. All of them are prepared
from one buffer on the host, pageable in one round and pinned in the other, that is overwritten as
soon as `prepare` returns. Each step must equal the step of a fresh instance that waits for the
device: a copy that reads the buffer when the device gets to it, or a table of the next step written
over one that is still in use, gives the mapping of another step (vllm #36013).

There is no model of this for a CPU: there the subject's tensors are where the mapping is, so that
the code that copies between the two does not run at all. What streams have a part in, the tables of
a step that the next one writes over while a side still reads them, is judged on modelled streams by
race and schedule, which queue a second step in the memory of the first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.busy import keep_busy
from loragate.execution.session import Session, base_of
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial

_STEPS = 8


class Queue:
    name = OracleName.QUEUE

    def applies(self, trial: Trial) -> str | None:
        if trial.machine.device != "cuda":
            return "without a GPU there is no device that the host could run ahead of"
        return None if trial.case.tokens else "the batch has no rows"

    def judge(self, trial: Trial) -> Judgement:
        # nothing to round, so that a difference is another mapping and never the order of a sum
        kind = DataKind.EXACT
        pool = make_pool(trial.case, trial.seed, kind, trial.machine, trial.capabilities)
        base = base_of(trial, kind)
        batches = [
            make_batch(trial.case, trial.seed, step, kind, trial.machine) for step in range(_STEPS)
        ]
        wanted = [Session(trial, base, pool).step(copy_batch(batch)).clone() for batch in batches]
        ahead = 0
        for is_pinned in (False, True):
            results, was_behind = _queued(trial, base, pool, batches, is_pinned=is_pinned)
            ahead += was_behind
            for step, batch in enumerate(batches):
                wrong = judge_bits(
                    trial,
                    batch,
                    results[step] + 0.0,
                    wanted[step] + 0.0,
                    oracle=self.name,
                    failure=Failure.LATE_READ,
                    claim=f"the same step alone (step {step} of {_STEPS}, queued from a "
                    f"{'pinned' if is_pinned else 'pageable'} buffer that was reused at once)",
                )
                if wrong is not None:
                    return wrong
        # a subject may wait in prepare; then nothing was late
        return passed(self.name, steps=2.0 * _STEPS, rounds_ahead=float(ahead))


def host_buffer(like: Tensor, *, is_pinned: bool) -> Tensor:
    """What a server keeps for the mapping of the next step."""
    return torch.empty_like(like, pin_memory=is_pinned)


def _queued(
    trial: Trial, base: BaseLayer | None, pool: Pool, batches: list[Batch], *, is_pinned: bool
) -> tuple[list[Tensor], bool]:
    """The results of all steps, queued without waiting; and whether the device was still behind
    when the last of them had been queued."""
    session = Session(trial, base, pool)
    own = [copy_batch(batch) for batch in batches]
    # what is compiled, captured or allocated on first use would wait for the device
    session.step(copy_batch(batches[0]))
    buffer = host_buffer(batches[0].token_slots, is_pinned=is_pinned)
    torch.cuda.synchronize()
    results = []
    done = keep_busy()
    for batch in own:
        buffer.copy_(batch.token_slots)
        results.append(session.queue(replace(batch, token_slots=buffer)))
        # a base row for every adapter, and the last adapter for every base row
        buffer.copy_(torch.where(buffer == BASE_ROW, trial.case.slots - 1, BASE_ROW))
    was_behind = not done.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return results, was_behind
