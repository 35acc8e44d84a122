"""A subject whose answers are not what the protocol promises; the number of tokens says how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol import AnyInstance, BaseLayer, Capabilities, Pool
from loragate.subjects.torch.subject import DenseDelta, TorchSubject


class Half:
    """An instance that cannot empty a slot."""

    load = prepare = apply = len


def fail_an_assertion() -> None:
    raise AssertionError("slots are sorted")


def leave() -> None:
    sys.exit(0)


# what `apply` returns in place of `out`
ANSWERS: Mapping[int, Callable[[Tensor], object]] = {
    31: lambda out: None,
    32: lambda out: [out],
    33: lambda out: out[:, 1:],
    34: lambda out: out.double(),
    35: lambda out: out.to("meta"),
    36: lambda out: out.clone(),
}
OPENED: Mapping[int, object] = {41: None, 42: Half()}
# number of tokens -> the method that raises, and how
RAISED: Mapping[int, tuple[str, Callable[[], None]]] = {
    51: ("open", fail_an_assertion),
    52: ("load", fail_an_assertion),
    53: ("prepare", fail_an_assertion),
    54: ("apply", fail_an_assertion),
    55: ("unload", leave),
}


class Breaking(TorchSubject):
    name = "breaking"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        raise_at("open", case.tokens)
        if case.tokens in OPENED:
            return OPENED[case.tokens]  # type: ignore[return-value]
        return _Instance(case)


class RaisesWhenAsked(TorchSubject):
    name = "raises_when_asked"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        raise LookupError("no table for this device")


def raise_at(method: str, tokens: int) -> None:
    where, fault = RAISED.get(tokens, ("", leave))
    if where == method:
        fault()


class _Instance(DenseDelta):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tokens = case.tokens

    def load(self, slot: int, pool: Pool) -> None:
        raise_at("load", self.tokens)
        super().load(slot, pool)

    def unload(self, slot: int) -> None:
        raise_at("unload", self.tokens)
        super().unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        raise_at("prepare", self.tokens)
        super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        raise_at("apply", self.tokens)
        result = super().apply(x, out)
        answer = ANSWERS.get(self.tokens)
        return result if answer is None else answer(result)  # type: ignore[return-value]
