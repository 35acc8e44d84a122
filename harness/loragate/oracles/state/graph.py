"""A captured step gives what the step gives without a graph, whatever changed since the capture.

A runner captures once, while all rows use slot 0 or none does, and replays with others: base rows
only, one slot, fewer and more, rows that are padding, adapters that were replaced, made smaller or
unloaded. Between the replays of one batch size come those of another, whose graph shares the pool
of memory. Each result is compared with an instance that runs the same steps without graphs. What
the capture froze and a server changes - a grid, a number that the host computed, kernels that
were left out, the address of a table or of weights - is wrong in one of these steps (sglang #28371,
vllm #15090, #43314, #34119).

Data need no rounding, so the bits must be equal whatever path either of them takes. Of a replay the
padding, which consists of base rows, holds NaN in its input, or ids of another row: what the other
rows give must not show that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, base_of
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.pool_changes import trimmed
from loragate.inputs.vocabulary import padding_id
from loragate.matrix.case import Case, Execution, Ranks, Site
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import Batch, Pool, Trial

_SMALLER = 3
# every so many scenes have a step of the other size as well
_OTHER_SIZE = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens before a step, and the step. `loads`: slot -> the pool with its new adapter, or
    None to empty it. `slots` are repeated over the `live` rows (None: all); the others are padding.
    """

    what: str
    slots: Sequence[int]
    loads: dict[int, Pool | None] = field(default_factory=dict)
    live: int | None = None


class Graph:
    name = OracleName.GRAPH

    def applies(self, trial: Trial) -> str | None:
        if trial.case.execution is not Execution.GRAPH:
            return "only a case of graphs captures"
        return None if trial.case.tokens else "a batch without rows leaves nothing to compare"

    def judge(self, trial: Trial) -> Judgement:
        base = base_of(trial, DataKind.EXACT)
        eager = replace(trial, case=replace(trial.case, execution=Execution.EAGER))
        sessions = [Session(trial, base), Session(eager, base)]
        count = 0
        for number, scene in enumerate(_scenes(trial)):
            _apply_loads(sessions, scene)
            for tokens in _sizes(trial)[: 1 if number % _OTHER_SIZE else 2]:
                wrong = self._step(trial, sessions, scene, tokens, count)
                if wrong is not None:
                    return wrong
                count += 1
        return passed(self.name, steps=float(count))

    def _step(
        self, trial: Trial, sessions: Sequence[Session], scene: Scene, tokens: int, step: int
    ) -> Judgement | None:
        live = tokens if scene.live is None else min(scene.live, tokens)
        batch = _batch(trial, scene.slots, tokens, live, step)
        graph, eager = sessions
        replayed = graph.step(_with_bad_padding(trial.case, copy_batch(batch), live))
        wanted = eager.step(copy_batch(batch))
        claim = f"the step without a graph ({scene.what}, {live} of {tokens} rows)"
        return judge_bits(
            trial,
            batch,
            _without_padding(replayed, batch, live),
            _without_padding(wanted, batch, live),
            oracle=self.name,
            failure=Failure.REPLAY_DIFFERS,
            claim=claim,
        )


def _scenes(trial: Trial) -> Iterator[Scene]:
    case, kind = trial.case, DataKind.EXACT
    full = replace(case, ranks=Ranks.FULL)
    pool = make_pool(full, trial.seed, kind, trial.machine, trial.capabilities)
    other = make_pool(full, trial.seed + 1, kind, trial.machine, trial.capabilities)
    every = [BASE_ROW, *range(case.slots)]
    last = case.slots - 1
    everything: dict[int, Pool | None] = dict.fromkeys(range(case.slots), pool)
    # the first step of each size is captured
    yield Scene("slots without an adapter", every)
    yield Scene("all slots", every, everything)
    yield Scene("base rows only", [BASE_ROW])
    yield Scene("one slot", [last])
    yield Scene("fewer slots", every[: 1 + (case.slots + 1) // 2])
    yield Scene("more slots in another order", list(reversed(every)))
    yield Scene("few rows, then padding", every, live=max(1, case.tokens // _SMALLER))
    yield Scene("one row, then padding", [last], live=1)
    yield Scene("other weights in slot 0", every, {0: other})
    yield Scene("a smaller adapter", every, {last: trimmed(other, max(1, case.rank // 4))})
    yield Scene("an empty slot", every, {0: None})
    yield Scene("the first adapters again", every, everything)


def _sizes(trial: Trial) -> list[int]:
    """Two sizes of batches, each of which has a graph."""
    tokens = trial.case.tokens
    return list(dict.fromkeys((tokens, max(1, tokens // 2))))


def _apply_loads(sessions: Sequence[Session], scene: Scene) -> None:
    for session in sessions:
        for slot, pool in scene.loads.items():
            if pool is None:
                session.instance.unload(slot)
            else:
                session.instance.load(slot, pool)


def _batch(trial: Trial, slots: Sequence[int], tokens: int, live: int, step: int) -> Batch:
    """A batch whose first `live` rows use `slots` in turn."""
    case = replace(trial.case, tokens=tokens)
    batch = make_batch(case, trial.seed, step, DataKind.EXACT, trial.machine)
    rows = [slots[row % len(slots)] if row < live else BASE_ROW for row in range(tokens)]
    return replace(batch, token_slots=torch.tensor(rows, dtype=torch.int32))


def _with_bad_padding(case: Case, batch: Batch, live: int) -> Batch:
    bad = padding_id(case) if case.site is Site.EMBEDDING else float("nan")
    batch.x[_first_padded(batch.x, len(batch.token_slots), live) :] = bad
    return batch


def _without_padding(result: Tensor, batch: Batch, live: int) -> Tensor:
    """Either zero is right where other kernels run: -0.0 becomes 0.0."""
    values = result + 0.0
    values[_first_padded(values, len(batch.token_slots), live) :] = 0
    return values


def _first_padded(tensor: Tensor, tokens: int, live: int) -> int:
    """The first row of padding in a tensor with one row or several for each token."""
    return live * (len(tensor) // tokens)
