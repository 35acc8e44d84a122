"""The only way from the harness into a subject: errors are marked, answers are checked.

Oracles get a subject as a `CheckedSubject`, and its instances as `CheckedInstance`. An answer that
the protocol does not allow is a BrokenProtocol here, before an oracle computes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import IN_PLACE_SITES, Case
from loragate.protocol.capabilities import Capabilities
from loragate.protocol.error_origin import BrokenProtocol, subject_code
from loragate.protocol.process_state import unchanged_process
from loragate.protocol.subject import AnyInstance, Instance, MoEInstance, Subject
from loragate.protocol.tensors import BaseLayer, Pool, Routes

_METHODS = ("load", "unload", "prepare", "apply")


class CheckedSubject:
    """`own` is the subject itself."""

    def __init__(self, own: Subject) -> None:
        self.own = own

    @property
    def name(self) -> str:
        return self.own.name

    def version(self) -> str:
        with subject_code():
            return self.own.version()

    def capabilities(self, machine: Machine) -> Capabilities | str:
        with subject_code():
            have: object = self.own.capabilities(machine)
        if not isinstance(have, (Capabilities, str)):
            raise BrokenProtocol(
                f"capabilities(machine) returned {_shown(have)}; expected a Capabilities, or a "
                "str with the reason why nothing can run here"
            )
        return have

    def engine_target(self, case: Case) -> str:
        """What starts the engine of a case; see EngineSubject."""
        make = getattr(self.own, "engine_target", None)
        if not callable(make):
            raise BrokenProtocol(
                f"subject {self.name} supports site engine without engine_target(case)"
            )
        with subject_code():
            target: object = make(case)
        if isinstance(target, str):
            module, _, function = target.partition(":")
            if module and function:
                return target
        given = repr(target) if isinstance(target, str) else _shown(target)
        raise BrokenProtocol(f'engine_target(case) returned {given}; expected "module:function"')

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> CheckedInstance:
        with unchanged_process("open"), subject_code():
            own = self.own.open(case, machine, base)
            missing = [name for name in _METHODS if not callable(getattr(own, name, None))]
        if missing:
            raise BrokenProtocol(
                f"open(case, machine, base) returned {_shown(own)} without "
                f"{', '.join(missing)}; expected an instance with {', '.join(_METHODS)}"
            )
        return CheckedInstance(own, case, base)


class CheckedInstance:
    """`own` is the instance that the subject opened."""

    def __init__(self, own: AnyInstance, case: Case, base: BaseLayer | None = None) -> None:
        self.own = own
        self._case, self._parts = case, _parts_of(base)

    def load(self, slot: int, pool: Pool) -> None:
        with unchanged_process("load"), subject_code():
            self.own.load(slot, pool)

    def unload(self, slot: int) -> None:
        with unchanged_process("unload"), subject_code():
            self.own.unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        with unchanged_process("prepare", is_step=True), subject_code():
            self.own.prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor, routes: Routes | None = None) -> Tensor:
        def call(own: AnyInstance) -> Tensor:
            if routes is None:
                return cast(Instance, own).apply(x, out)
            return cast(MoEInstance, own).apply(x, out, routes)

        with unchanged_process("apply", is_step=True):
            return self.run(call, out)

    def run(self, call: Callable[[AnyInstance], Tensor], out: Tensor) -> Tensor:
        """The result of `call`, which applies the own instance to `out`, for instance through
        torch.compile."""
        # the subject may resize it
        shape = out.shape
        with subject_code():
            # the checks as well: a strange kind of tensor may refuse even those
            return self._checked(call(self.own), out, shape)

    def _checked(self, result: object, out: Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(result, Tensor):
            raise _broken(_shown(result), f"a tensor {_facts(out, shape)}")
        if _facts(result, result.shape) != _facts(out, shape):
            given, wanted = _facts(result, result.shape), _facts(out, shape)
            raise _broken(f"a tensor {given}", f"{wanted}, like out")
        in_place = self._case.site in IN_PLACE_SITES
        if in_place and result.numel() and result.data_ptr() != out.data_ptr():
            raise _broken(
                "a tensor in other memory", f"out itself, which {self._case.site} changes"
            )
        for name, part in self._parts if result.numel() else ():
            tensor = part()
            if tensor is not None and _storage(tensor) == _storage(result):
                # whoever changes the result damages the layer
                raise _broken(f"a view of the {name} of the base layer", "a tensor of its own")
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parts_of(base: BaseLayer | None) -> list[tuple[str, ReferenceType[Tensor]]]:
    """The tensors of a base layer, which nobody keeps alive here."""
    if base is None:
        return []
    values = [(field.name, getattr(base, field.name)) for field in fields(base)]
    return [(name, ref(value)) for name, value in values if isinstance(value, Tensor)]


def _broken(given: str, wanted: str) -> BrokenProtocol:
    return BrokenProtocol(f"apply returned {given}; expected {wanted}")


def _facts(tensor: Tensor, shape: torch.Size) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    # such a tensor keeps all that it was computed from
    history = ", with a history for gradients" if tensor.requires_grad else ""
    return f"of shape {list(shape)}, {tensor.dtype} on {tensor.device}{layout}{history}"


def _shown(value: object) -> str:
    """A value that may be anything, without calling its code."""
    if value is None:
        return "None"
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"an object of type {where}{kind.__qualname__}"
