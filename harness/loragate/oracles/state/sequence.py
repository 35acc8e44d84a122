"""A step after other steps equals the same step on a fresh instance.

One instance sees what happens in a server: a large batch, a smaller one, one of base rows only, a
slot that gets a smaller adapter with one slice fewer, an adapter that leaves its slot and returns
in another. If adapters are small, also a slot that is emptied beside others, a batch with the same
adapters for other rows, steps of other instances that come in between, an adapter that a scale of
zero turns off, a single row with an adapter, and other adapters from the same memory. After each
scene the step is repeated on a fresh instance with the same adapters; whatever differs is left over
from before (sglang #8103, #29468, vllm #42120). Rows of an empty slot must be what they are as base
rows, the single row what it is beside others, and no step may write to an earlier result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.runners import WriteInput
from loragate.execution.session import Session, base_of
from loragate.inputs import DataKind, copy_batch, make_pool
from loragate.inputs.batch import rows_of
from loragate.inputs.placement import bits_of, owned, whole
from loragate.inputs.pool_changes import with_doubled_scales_of
from loragate.matrix.case import Ranks
from loragate.oracles.evidence import judge_bits, passed
from loragate.oracles.state.scenes import Scene, alone, batch_of, scenes
from loragate.protocol import BaseLayer, Batch, Pool, Trial

# nothing to round, so that a difference is state and never the order of a sum
_KIND = DataKind.EXACT
# elements of a result that stays until the end, with a copy; no estimate of memory has more
_MOST_KEPT = 1 << 14


@dataclass(slots=True)
class _Server:
    """The instance under test after some scenes: what its slots hold, what another instance does
    before its next step, and the results that are kept, each with a copy."""

    session: Session
    base: BaseLayer | None
    resident: dict[int, Pool | None] = field(default_factory=dict)
    between: WriteInput | None = None
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def load(self, scene: Scene) -> None:
        for slot, pool in scene.loads.items():
            _move(self.session, slot, pool)
        self.resident |= scene.loads | scene.same_as

    def step(self, batch: Batch) -> Tensor:
        result = self.session.step(batch, self.between)
        # memory has place for two instances
        self.between = None
        if result.numel() <= _MOST_KEPT:
            self.results.append((result, result.clone()))
        return result

    @property
    def empty_slots(self) -> list[int]:
        return [slot for slot, pool in self.resident.items() if pool is None]


class Sequence:
    name = OracleName.SEQUENCE

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        base = base_of(trial, _KIND)
        server = _Server(Session(trial, base), base)
        # as a server does that starts
        for slot in range(trial.case.slots):
            server.session.instance.unload(slot)
        count = 0
        for count, scene in enumerate(scenes(trial, _KIND)):
            wrong = self._judge_scene(trial, server, scene, count)
            if wrong is not None:
                return wrong
        return self._written_over(server.results) or passed(self.name, steps=float(count + 1))

    def _judge_scene(
        self, trial: Trial, server: _Server, scene: Scene, count: int
    ) -> Judgement | None:
        server.load(scene)
        batch = batch_of(trial, _KIND, scene, count)
        own, other = copy_batch(batch), copy_batch(batch)
        if scene.moved_rows:
            # a step that is prepared and never run, with the slots of the step before
            before = replace(scene, moved_rows=False, all_slots=True)
            slots = batch_of(trial, _KIND, before, count - 1).token_slots
            server.session.instance.prepare(slots)
        result = server.step(own)
        # nothing precedes the first step
        if not count:
            return None
        # the fresh instance is gone when the other one is made
        wanted = _fresh_instance(trial, server.base, server.resident).step(other)
        claim = f"a fresh instance ({scene.what})"
        wrong = self._equal(trial, batch, result, wanted, claim)
        wrong = wrong or self._surroundings(scene, own, other)
        if scene.alone:
            wrong = wrong or self._alone(trial, batch, server.empty_slots, server.session, result)
        if wrong is None and scene.beside is not None:
            beside = replace(trial, case=scene.beside)
            given = batch_of(beside, _KIND, scene, count)
            server.between = partial(_other_instance(beside).step, given)
        return wrong

    def _equal(
        self, trial: Trial, batch: Batch, result: Tensor, wanted: Tensor, claim: str
    ) -> Judgement | None:
        """A FAIL if they differ, but for the sign of a zero."""
        return judge_bits(
            trial,
            batch,
            result + 0.0,
            wanted + 0.0,
            oracle=self.name,
            failure=Failure.STALE_STATE,
            claim=claim,
        )

    def _alone(
        self, trial: Trial, batch: Batch, empty_slots: list[int], session: Session, result: Tensor
    ) -> Judgement | None:
        """A FAIL if a row is not what it was in `result` while all others are base rows, or if rows
        of empty slots are no base rows: a fresh instance may be wrong in the same way."""
        empty = torch.isin(batch.token_slots, torch.tensor(empty_slots, dtype=torch.int32))
        given, tokens = alone(batch, empty)
        rows = rows_of(tokens, len(result) // max(1, len(batch.token_slots))).to(result.device)
        mixed = result.clone()
        mixed[rows] = session.step(given)[rows]
        claim = "a step with one of its adapters, and base rows in place of empty slots"
        return self._equal(trial, batch, result, mixed, claim)

    def _written_over(self, results: list[tuple[Tensor, Tensor]]) -> Judgement | None:
        """A FAIL if a result is not what it was when its step ended: it belongs to the caller."""
        # one copy from the device, for which the host waits
        counts = [(bits_of(result) != bits_of(before)).sum() for result, before in results]
        for number, count in enumerate(torch.stack(counts).tolist() if counts else ()):
            if count:
                message = f"a later step wrote {counted(count, 'element')} of the result of step "
                message += f"{number} of {len(results)}"
                return Judgement(self.name, Verdict.FAIL, Failure.FOREIGN_MEMORY, message)
        return None

    def _surroundings(self, scene: Scene, own: Batch, other: Batch) -> Judgement | None:
        """A FAIL if the step wrote in other places than the fresh instance: after its own rows lie
        those of an earlier, larger batch."""
        mask = bits_of(whole(own.out)) != bits_of(whole(other.out))
        count = int((mask & ~owned(own.out)).sum())
        if not count:
            return None
        written = counted(count, "element around out was", "elements around out were")
        message = f"{written} written, which a fresh instance does not do "
        message += f"({scene.what})"
        return Judgement(self.name, Verdict.FAIL, Failure.STALE_STATE, message)


def _move(session: Session, slot: int, pool: Pool | None) -> None:
    if pool is None:
        # a server also empties what is empty, as vllm does with each slot that gets an adapter
        for _ in range(2):
            session.instance.unload(slot)
    else:
        session.instance.load(slot, pool)


def _other_instance(trial: Trial) -> Session:
    """With another base layer, and an adapter in every slot, none of which the instance under test
    has, nor its scale."""
    full = replace(trial.case, ranks=Ranks.FULL)
    own, others = (
        make_pool(full, trial.seed + after, _KIND, trial.machine, trial.capabilities)
        for after in (0, 2)
    )
    others = with_doubled_scales_of(own, others)
    # only its scales were needed, and memory is short while the others are loaded
    del own
    base = base_of(replace(trial, seed=trial.seed + 2), _KIND)
    return _fresh_instance(trial, base, dict.fromkeys(range(trial.case.slots), others))


def _fresh_instance(
    trial: Trial, base: BaseLayer | None, resident: dict[int, Pool | None]
) -> Session:
    session = Session(trial, base)
    for slot in sorted(resident):
        if (pool := resident[slot]) is not None:
            session.instance.load(slot, pool)
    return session
