"""What an engine may be and answer, checked in its own process. What breaks the protocol cannot
always be pickled, and tensors would end with this process: nothing of it is sent.

Invariant: what is sent is made of classes of the harness and of plain ints. Imports no torch, for
which an engine may have to set variables first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from inspect import signature
from numbers import Integral, Real
from typing import Any

from loragate.engine.order import Call
from loragate.engine.requests import Completion, EngineCounts
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Logprobs
from loragate.matrix.problems import nearest

_TOKENS = "Completions of loragate.engine.requests with a tuple of int each"


class Breach(Exception):
    """The engine raised nothing, but did not keep the protocol. The message is one line: what was
    given, what is expected."""


def maker_of(target: str) -> Callable[..., object]:
    """What "module:function" names. Raises Breach, or what importing the module raises."""
    module_name, _, name = target.partition(":")
    returned = f"engine_target(case) returned {target!r}"
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # a package that the engine needs
            raise
        place = "in the current folder or in PYTHONPATH"
        raise Breach(f"{returned}, but there is no module {error.name!r} {place}") from error
    if not hasattr(module, name):
        near = nearest(name, [known for known in dir(module) if not known.startswith("_")])
        hint = f"; did you mean {near!r}?" if near else ""
        raise Breach(f"{returned}, but {module_name} has no {name!r}{hint}")
    maker: object = getattr(module, name)
    if not callable(maker):
        raise Breach(f"{returned}, which is {_kind(maker)}; expected a function or a class")
    return maker


def check_methods(target: str, made: object, wanted: Sequence[str]) -> None:
    """Raises Breach for an object that is no engine."""
    missing = [name for name in wanted if not callable(getattr(made, name, None))]
    if missing:
        given = "None" if made is None else f"{_kind(made)} without {', '.join(missing)}"
        expected = f"an engine with the methods {', '.join(wanted)}"
        raise Breach(f"{target} returned {given}; expected {expected}")


def called(name: str, function: Callable[..., object], *arguments: object) -> object:
    """What a function of the engine returns. Raises Breach if it does not take the arguments."""
    try:
        # of what is called, whatever it wraps
        takes = signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        # some classes of extensions have no signature
        return function(*arguments)
    try:
        takes.bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        raise Breach(f"{name}{takes} is called with ({kinds}): {error}") from error
    return function(*arguments)


def checked(call: Call, found: Any, case: Case) -> object:
    """An answer to a call, as it is sent. Raises Breach."""
    match call.method:
        case "generate":
            (requests,) = call.arguments
            assert isinstance(requests, list)
            return _completions(found, len(requests), case.logprobs is Logprobs.ON)
        case "counts":
            return _counts(found)
        case "trace":
            return _arrays(found)
        case "load" | "unload" | "close":
            # nothing is expected of them
            return None
    return found


def _completions(found: object, wanted: int, with_logprobs: bool) -> list[Completion]:
    if not isinstance(found, list):
        raise Breach(f"generate returned {_kind(found)}; expected a list of Completions")
    if len(found) != wanted:
        expected = f"expected {wanted}, one for each request"
        raise Breach(f"generate returned a list of {len(found)}; {expected}")
    return [_completion(one, with_logprobs) for one in found]


def _completion(one: object, with_logprobs: bool) -> Completion:
    if not isinstance(one, Completion):
        raise Breach(f"generate returned a list that holds {_kind(one)}; expected {_TOKENS}")
    tokens: object = one.tokens
    if not isinstance(tokens, tuple):
        given = f"a Completion whose tokens are {_kind(tokens)}"
        raise Breach(f"generate returned {given}; expected {_TOKENS}")
    for token in tokens:
        if not isinstance(token, Integral):
            given = f"a Completion whose tokens hold {_kind(token)}"
            raise Breach(f"generate returned {given}; expected {_TOKENS}")
    logprobs = _logprobs(one.logprobs, len(tokens), wanted=with_logprobs)
    return Completion(tuple(int(token) for token in tokens), logprobs)


def _logprobs(found: object, count: int, *, wanted: bool) -> tuple[float, ...] | None:
    if found is None and not wanted:
        return None
    if not isinstance(found, tuple) or not all(isinstance(value, Real) for value in found):
        given = f"a Completion whose logprobs are {_kind(found)}"
        if isinstance(found, tuple):
            given += " that holds something else than numbers"
        raise Breach(f"generate returned {given}; expected a tuple of float (logprobs: on)")
    if len(found) != count:
        given = f"a Completion with {len(found)} logprobs for {count} tokens"
        raise Breach(f"generate returned {given}; expected one for each")
    return tuple(float(value) for value in found)


def _counts(found: object) -> EngineCounts:
    if not isinstance(found, EngineCounts):
        expected = "an EngineCounts of loragate.engine.requests"
        raise Breach(f"counts returned {_kind(found)}; expected {expected}")
    counts: dict[str, int | None] = {}
    for field in fields(EngineCounts):
        value: object = getattr(found, field.name)
        if value is not None and not isinstance(value, Integral):
            given = f"an EngineCounts whose {field.name} is {_kind(value)}"
            raise Breach(f"counts returned {given}; expected an int or None")
        if value is not None and value < 0:
            given = f"an EngineCounts whose {field.name} is {int(value)}"
            raise Breach(f"counts returned {given}; expected 0 or more, or None")
        counts[field.name] = None if value is None else int(value)
    return EngineCounts(**counts)


def _arrays(found: object) -> dict[str, Any]:
    """As arrays: a tensor would be shared between the processes, and end with this one."""
    # an engine that shows tensors has imported it
    from torch import Tensor

    if not isinstance(found, Mapping):
        raise Breach(f"trace returned {_kind(found)}; expected a mapping of names to tensors")
    for name, values in found.items():
        if not isinstance(name, str) or not isinstance(values, Tensor):
            given = f"{_kind(name)} with {_kind(values)}"
            raise Breach(f"trace returned {given} in it; expected names with tensors")
    return {name: values.detach().double().cpu().numpy() for name, values in found.items()}


def _kind(value: object) -> str:
    """Of a value that may be anything, without calling its code."""
    kind = type(value)
    if value is None:
        return "None"
    if kind.__module__ == "builtins":
        return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
