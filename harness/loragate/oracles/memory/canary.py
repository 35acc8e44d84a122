"""A step reads and writes its own memory only.

It runs twice on data that leaves nothing to round: once as usual, and once with poison in all that
must not be read - fresh allocations, ranks that an adapter does not use, adapters and experts that
no row uses, rows without an adapter, output that is to be overwritten. The results must be
bit-equal. Both runs must also leave the guard bands around every tensor, all inputs and the
adapters unchanged.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, Dead, copy_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.pairs import OutRows, out_rows, pair_rows
from loragate.inputs.placement import bits_of, owned, whole
from loragate.inputs.poison import poisoned_allocations
from loragate.inputs.pool_changes import with_huge_unused
from loragate.matrix.case import IN_PLACE_SITES, Case, Write
from loragate.oracles.evidence import judge_bits, passed
from loragate.oracles.numeric.golden import touched
from loragate.protocol import BaseExperts, BaseLayer, Batch, Pool, Trial

# elements that are counted at a time
_COUNTED = 1 << 26


class Canary:
    name = OracleName.CANARY

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.EXACT)
        clean = _Watched(trial, base, pool, copy_batch(batch))
        poisoned = _Watched(trial, base, *_poisoned(trial, batch))
        wanted = clean.step()
        with poisoned_allocations():
            result = poisoned.step()
        # a number added to a NaN leaves no trace, so inputs are watched in the clean run as well
        wrong = clean.changed() or poisoned.changed()
        if wrong is not None:
            return wrong
        wrong = judge_bits(
            trial,
            batch,
            result + 0.0,
            wanted + 0.0,
            oracle=self.name,
            failure=Failure.FOREIGN_MEMORY,
            claim="the result without poison in unused memory",
        )
        return wrong or passed(self.name)


def _poisoned(trial: Trial, batch: Batch) -> tuple[Pool, Batch]:
    dead = Dead.NAN if trial.capabilities.skips_dead_ranks else Dead.ZERO
    pool = make_pool(
        trial.case, trial.seed, DataKind.EXACT, trial.machine, trial.capabilities, dead=dead
    )
    rows = out_rows(batch)
    batch = copy_batch(batch)
    if trial.case.site in IN_PLACE_SITES:
        if trial.case.write is Write.STORE:
            batch.out.masked_fill_(touched(pool, rows), float("nan"))
        idle = torch.ones(len(batch.x), dtype=torch.bool, device=batch.x.device)
        live = (rows.slots != BASE_ROW).to(batch.x.device)
        idle[rows.x_rows[live]] = False
        batch.x.masked_fill_(idle[:, None], float("nan"))
        if batch.routes is not None and batch.routes.weights is not None:
            batch.routes.weights.view(-1).masked_fill_(~live, float("nan"))
    elif batch.routes is not None:
        # base rows need their weights as well
        rows = pair_rows(batch)
        assert batch.routes.weights is not None
        batch.routes.weights.view(-1).masked_fill_(rows.experts < 0, float("nan"))
    return with_huge_unused(pool, _used(trial.case, rows)), batch


def _used(case: Case, rows: OutRows) -> Tensor:
    """bool [slots, experts] on the CPU: whether any row uses them."""
    used = torch.zeros(case.slots, case.experts, dtype=torch.bool)
    live = rows.slots != BASE_ROW
    used[rows.slots[live].long(), rows.experts.cpu()[live]] = True
    return used


class _Watched:
    """A step on a fresh instance, with copies of everything that it could change."""

    def __init__(self, trial: Trial, base: BaseLayer | None, pool: Pool, batch: Batch) -> None:
        self.trial, self.base, self.pool, self.batch = trial, base, pool, batch
        self.in_place = trial.case.site in IN_PLACE_SITES
        self.tensors = {"x": whole(batch.x), "token_slots": batch.token_slots, "A": pool.a}
        self.tensors |= {f"B of slice {part}": b for part, b in enumerate(pool.b)}
        if batch.routes is not None:
            self.tensors["topk_ids"] = whole(batch.routes.topk_ids)
            if batch.routes.expert_map is not None:
                self.tensors["the expert map"] = whole(batch.routes.expert_map)
            if batch.routes.weights is not None:
                self.tensors["the router weights"] = whole(batch.routes.weights)
        if base is not None:
            self.tensors["the base weight"] = base.weight
            if base.bias is not None:
                self.tensors["the base bias"] = base.bias
            if isinstance(base, BaseExperts):
                self.tensors["the base weight of down"] = base.down
                if base.down_bias is not None:
                    self.tensors["the base bias of down"] = base.down_bias
                for part, scales in enumerate(base.scales or ()):
                    name = "the base weight of down" if part else "the base weight"
                    self.tensors[f"the scales of {name}"] = scales
        if pool.down is not None:
            self.tensors |= {"A of down": pool.down.a, "B of down": pool.down.b[0]}
        if not self.in_place:
            self.tensors["out"] = whole(batch.out)
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.out_before = whole(batch.out).clone()

    def step(self) -> Tensor:
        return Session(self.trial, self.base, self.pool).step(self.batch)

    def changed(self) -> Judgement | None:
        """A FAIL if anything has changed except the elements of an in-place output."""
        # one copy from the device, for which the host waits; the slots of tokens are on the host
        flags = [self._mask(name).any().to(self.batch.x.device) for name in self.tensors]
        is_changed = torch.stack(flags).tolist()
        name = next(compress(self.tensors, is_changed), None)
        if name is not None:
            count = _count(self._mask(name))
            return _failure(f"the step changed {counted(count, 'element')} of {name}", {})
        if not self.in_place:
            return None
        mask = bits_of(whole(self.batch.out)) != bits_of(self.out_before)
        mask &= ~owned(self.batch.out)
        return self._written_outside(mask) if mask.any() else None

    def _mask(self, name: str) -> Tensor:
        """Where the bits of a tensor have changed."""
        return bits_of(self.tensors[name]) != bits_of(self.before[name])

    def _written_outside(self, mask: Tensor) -> Judgement:
        out = self.batch.out
        place = int(torch.argmax(mask.view(torch.uint8))) - int(out.storage_offset())
        row, column = divmod(place, out.stride(0))
        message = (
            f"the step wrote {counted(_count(mask), 'element')} outside of out "
            f"{list(out.shape)}, the first at row {row}, column {column}"
        )
        return _failure(message, {"row": row, "column": column})


def _count(mask: Tensor) -> int:
    """How many elements are true. A sum takes 8 bytes for each, which a vocabulary has no memory
    for, so it is made in parts."""
    return sum(int(part.sum()) for part in torch.split(mask.flatten(), _COUNTED))


def _failure(message: str, where: dict[str, int | str]) -> Judgement:
    failure = Failure.FOREIGN_MEMORY
    return Judgement(OracleName.CANARY, Verdict.FAIL, failure, message, where=where)
