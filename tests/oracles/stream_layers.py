"""Small layers on two streams, right and wrong, and a subject that runs one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Execution, Streams
from loragate.protocol import BaseLayer, Capabilities, Instance, Pool
from loragate.subjects.torch.subject import TorchSubject


class Layer:
    """The base product on the main stream, the delta of all rows on a side stream."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        self.case, self.base = case, base
        self.side = torch.cuda.Stream() if case.streams is Streams.DUAL else None
        self.start, self.end = (
            (torch.cuda.Event(), torch.cuda.Event()) if self.side else (None,) * 2
        )
        rank, device = case.rank * len(case.slices), base.weight.device
        self.a = torch.zeros(case.slots + 1, rank, case.in_features, device=device)
        self.b = torch.zeros(case.slots + 1, case.out_features, rank, device=device)
        self.shrunk = torch.zeros(case.tokens, rank, device=device)
        self.delta = torch.zeros(case.tokens, case.out_features, device=device)
        self.rows = torch.zeros(case.tokens, dtype=torch.long, device=device)
        # on the host beside a GPU, too
        self.flag = torch.zeros(1, dtype=torch.bool)

    def load(self, slot: int, pool: Pool) -> None:
        column = 0
        for part, (b, rank, scale) in enumerate(
            zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
        ):
            ranks = slice(part * self.case.rank, part * self.case.rank + rank)
            self.a[slot, ranks] = pool.a[slot, part, :rank].float()
            self.b[slot, column : column + b.shape[1], ranks] = scale * b[slot, :, :rank].float()
            column += b.shape[1]

    def unload(self, slot: int) -> None:
        self.a[slot] = 0

    def prepare(self, token_slots: Tensor) -> None:
        # base rows have a slot of zeros
        self.rows.copy_(torch.where(token_slots < 0, self.case.slots, token_slots))

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.side is not None:
            return self.dual(x)
        self.work(x)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)

    def work(self, x: Tensor) -> None:
        torch.bmm(self.a[self.rows], x.float()[:, :, None], out=self.shrunk[:, :, None])
        torch.bmm(self.b[self.rows], self.shrunk[:, :, None], out=self.delta[:, :, None])

    def joined(self, y: Tensor) -> Tensor:
        return (y.float() + self.delta).to(y.dtype)


class RoundsOnTwoStreams(Layer):
    """In any order of the streams, and not on one of them."""

    def joined(self, y: Tensor) -> Tensor:
        result = super().joined(y)
        return result if self.side is None else result + 1


class WithoutFork(Layer):
    """The side does not wait for the input, which the main stream has just written."""

    def dual(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(self.side):
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class WaitsInItsPreparation(WithoutFork):
    """What was queued before a step is prepared is done when the host goes on."""

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        if self.side is not None:
            torch.cuda.synchronize()


class WaitsForTheSide(Layer):
    """No capture takes this."""

    def joined(self, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return super().joined(y)


class WithoutJoin(Layer):
    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class LoadsBeside(Layer):
    """Loads on a stream of their own: they wait for no step, and no step waits for them."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.copies = torch.cuda.Stream() if self.side else None

    def load(self, slot: int, pool: Pool) -> None:
        with torch.cuda.stream(self.copies):
            super().load(slot, pool)


class LoadsBesideTheStepBefore(LoadsBeside):
    """A step waits for the loads before it, and these do not wait for the step before them."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)


class JoinsTwoSteps(WithoutJoin):
    """As with two events in turns, of which a third step has none."""

    steps = 0

    def dual(self, x: Tensor) -> Tensor:
        self.steps += 1
        return Layer.dual(self, x) if self.steps < 3 else super().dual(x)


class ReadsItsFlagInPlaceOfTheJoin(WithoutJoin):
    def joined(self, y: Tensor) -> Tensor:
        assert not self.flag.item()
        return super().joined(y)


class RecordedOutside(Layer):
    """The end is recorded behind the scope of the side stream: on the main one."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
        self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class WaitsBeforeRecord(Layer):
    """In the first step the main stream waits for what nothing has recorded."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        torch.cuda.current_stream().wait_event(self.end)
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class TwoForks(Layer):
    """Two halves of the batch on two side streams."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.other = torch.cuda.Stream() if self.side else None
        self.other_end = torch.cuda.Event() if self.side else None

    def dual(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        self.start.record()
        sides = ((self.side, self.end), (self.other, self.second_end()))
        for (stream, end), rows in zip(sides, (slice(half), slice(half, None)), strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(self.start)
                a, b = self.a[self.rows[rows]], self.b[self.rows[rows]]
                self.delta[rows] = (b @ (a @ x[rows].float()[:, :, None]))[:, :, 0]
                end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        for _, end in sides:
            torch.cuda.current_stream().wait_event(end)
        return self.joined(y)

    def second_end(self) -> Any:
        return self.other_end


class OneEventForTwoForks(TwoForks):
    def second_end(self) -> Any:
        return self.end


class FreedOnMain(Layer):
    """An input of the side goes back to the main stream while the side reads it."""

    def dual(self, x: Tensor) -> Tensor:
        wide = x.float()
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(wide)
            self.end.record()
        self.let_go(wide)
        del wide
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)

    def let_go(self, wide: Tensor) -> None:
        pass


class KeptByRecordStream(FreedOnMain):
    def let_go(self, wide: Tensor) -> None:
        wide.record_stream(self.side)


class OverwritesTheInput(Layer):
    """The main stream changes x while the side may still read it."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        x.zero_()
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class NextStepTooEarly(Layer):
    """The join waits for the shrink only: the expand may run into the next step."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            torch.bmm(self.a[self.rows], x.float()[:, :, None], out=self.shrunk[:, :, None])
            self.end.record()
            torch.bmm(self.b[self.rows], self.shrunk[:, :, None], out=self.delta[:, :, None])
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class PreparesBeside(Layer):
    """The mapping is written on a stream of its own, behind the last step that ran eagerly."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.copies = torch.cuda.Stream() if self.side else None
        self.done = torch.cuda.Event() if self.side else None

    def prepare(self, token_slots: Tensor) -> None:
        if self.copies is None:
            super().prepare(token_slots)
            return
        self.wait()
        with torch.cuda.stream(self.copies):
            super().prepare(token_slots)
        torch.cuda.current_stream().wait_stream(self.copies)

    def wait(self) -> None:
        self.copies.wait_event(self.done)

    def dual(self, x: Tensor) -> Tensor:
        y = super().dual(x)
        # an event that is recorded within a capture says nothing about its replays
        if not torch.cuda.is_current_stream_capturing():
            self.done.record()
        return y


class PreparesBehind(PreparesBeside):
    def wait(self) -> None:
        self.copies.wait_stream(torch.cuda.current_stream())


class Serialised(Layer):
    """The side waits for the base product."""

    def dual(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.base.weight, self.base.bias)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.work(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.joined(y)


class JoinsAtOnce(Layer):
    """The base product waits for the side."""

    def dual(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.work(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class OverlapsInItsFirstStep(JoinsAtOnce):
    """Later steps run one stream after the other."""

    steps = 0

    def dual(self, x: Tensor) -> Tensor:
        self.steps += 1
        return Layer.dual(self, x) if self.steps == 1 else super().dual(x)


class UninitialisedDelta(Layer):
    """Rows without an adapter are left out of a delta that nothing has set to zero."""

    def work(self, x: Tensor) -> None:
        self.delta = torch.empty_like(self.delta)
        for row, slot in enumerate(self.rows.tolist()):
            if slot < self.case.slots:
                self.delta[row] = self.b[slot] @ (self.a[slot] @ x[row].float())


class LayerOnStreams(TorchSubject):
    """The torch subject with layers of another class."""

    def __init__(self, layer: type[Layer]) -> None:
        self.layer = layer

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        supports = {"streams": frozenset(Streams), "execution": frozenset(Execution)}
        supports = {**have.supports, **supports}
        return replace(have, supports=supports, host_tensors=lambda layer: [layer.flag])

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        assert base is not None
        return self.layer(case, base)
