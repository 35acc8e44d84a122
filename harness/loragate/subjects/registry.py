"""The subjects that come with the harness, and which legs of the gate belong to each.

A subject of your own needs no entry: it is named `module:object`. Nothing is imported before it is
asked for, so that a missing package concerns only those who asked for its subject; this module
imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, cast

from loragate.core.errors import CommandError
from loragate.core.machine import interpreter_is_on
from loragate.core.traces import error_and_place
from loragate.core.verdict import ExitCode
from loragate.matrix.problems import nearest

if TYPE_CHECKING:
    from loragate.protocol import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSubject:
    name: str
    # "module:object"
    target: str
    # provider of representative launches for the compile leg, "module:function"
    launches: str | None = None
    # pytest paths, relative to the project's root, of tests that need no device
    host_tests: tuple[str, ...] = ()
    # whether the gate checks that the listed findings still reproduce
    findings: bool = False
    # whether it has Triton kernels or custom operators, whose compilers write to caches
    compiles: bool = True


_METHODS = ("version", "capabilities", "open")


def _by_name(*subjects: RegisteredSubject) -> Mapping[str, RegisteredSubject]:
    found = {subject.name: subject for subject in subjects}
    assert len(found) == len(subjects), "two subjects have one name"
    return MappingProxyType(found)


SUBJECTS = _by_name(
    RegisteredSubject(
        name="lorakernels",
        target="loragate.subjects.lorakernels.subject:LoraKernelsSubject",
        launches="lorakernels.specs:launches",
        # adapters, slots, partition, plans, steps that are replayed from graphs, and the
        # plug-in of vLLM
        host_tests=(
            "tests/kernels",
            "tests/adapters",
            "tests/moe",
            "tests/serving",
            "tests/integrations/plug_in",
        ),
    ),
    RegisteredSubject(
        name="torch",
        target="loragate.subjects.torch.subject:TorchSubject",
        compiles=False,
    ),
    RegisteredSubject(
        name="transformers",
        target="loragate.subjects.transformers.subject:TransformersSubject",
        compiles=False,
    ),
    RegisteredSubject(
        name="vllm",
        target="loragate.subjects.vllm.subject:VllmSubject",
        findings=True,
    ),
    RegisteredSubject(
        name="vllm_lorakernels",
        target="loragate.subjects.vllm_lorakernels.subject:VllmLoraKernelsSubject",
    ),
)


def find_subject(name: str) -> Subject:
    """A new subject of that name.

    `module:object`: `object` is a class or a function that gives a subject without arguments.
    The module is found through PYTHONPATH or in the current folder, whichever command asks for it.
    Where kernels are interpreted, the interpreter is repaired for those of any subject.
    Raises ValueError for a name that leads nowhere, or to what is no subject. Where a subject that
    comes with the harness cannot be made, its installation is broken: CommandError.
    """
    check_subject_name(name)
    _repair_interpreter()
    registered = SUBJECTS.get(name)
    module_name, _, attribute = (registered.target if registered else name).partition(":")
    factory = _factory(name, _module(name, module_name), attribute)
    try:
        subject = factory()
        missing = _missing(subject)
    except (Exception, SystemExit) as error:
        raise unusable(name, f"{attribute}() raised {error_and_place(error)}") from error
    if missing:
        made = f"{attribute}() gives an object of type {type(subject).__qualname__}"
        raise unusable(name, f"{made}, which is no subject: it lacks {', '.join(missing)}")
    return cast("Subject", subject)


def _repair_interpreter() -> None:
    """Triton's own computes bf16 wrongly, and whoever wrote the subject would be blamed for it.
    CommandError where what repairs it cannot be imported."""
    if not interpreter_is_on():
        return
    try:
        # which does it
        import_module("lorakernels")
    except Exception as error:
        message = f"lorakernels repairs Triton's interpreter, and raised {error_and_place(error)}"
        raise CommandError(message, ExitCode.INFRASTRUCTURE) from error


def _missing(subject: object) -> list[str]:
    """What an object lacks to be a Subject."""
    lacks = [method for method in _METHODS if not callable(getattr(subject, method, None))]
    return lacks if isinstance(getattr(subject, "name", None), str) else ["name (a str)", *lacks]


def check_subject_name(name: str) -> None:
    """Raise ValueError for a name that is neither registered nor that of an object of a package
    that can be found. Imports nothing, and so finds no other mistake."""
    if name in SUBJECTS:
        return
    module, _, attribute = name.partition(":")
    package = module.partition(".")[0]
    if not (package and attribute):
        raise ValueError(_unknown(name))
    if "" not in sys.path:
        # `python -m` puts the current folder there, console scripts do not
        sys.path.append("")
    if package not in sys.modules and find_spec(package) is None:
        raise unusable(name, _no_module(package))


def unusable(name: str, why: str) -> Exception:
    """The error that says in one line that the subject of that name cannot be used."""
    message = f"subject {name!r}: {why}"
    if name in SUBJECTS:
        return CommandError(message, ExitCode.INFRASTRUCTURE)
    return ValueError(message)


def _module(name: str, module_name: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _unimportable(name, module_name, error) from error
        raise unusable(name, _no_module(error.name)) from error
    except (Exception, SystemExit) as error:
        raise _unimportable(name, module_name, error) from error


def _no_module(module: str) -> str:
    return f"there is no module {module!r} in the current folder or in PYTHONPATH"


def _unimportable(name: str, module_name: str, error: BaseException) -> Exception:
    return unusable(name, f"importing {module_name} raised {error_and_place(error)}")


def _factory(name: str, module: ModuleType, attribute: str) -> Callable[[], object]:
    """Raises for what does not exist, is no class or function, or needs arguments."""
    if not hasattr(module, attribute):
        near = nearest(attribute, [known for known in dir(module) if not known.startswith("_")])
        hint = f"; did you mean {near!r}?" if near else ""
        raise unusable(name, f"{module.__name__} has no {attribute!r}{hint}")
    factory: object = getattr(module, attribute)
    if not callable(factory):
        kind = type(factory).__qualname__
        allowed = "a class or a function that gives a subject"
        raise unusable(name, f"{attribute} is an object of type {kind}; allowed: {allowed}")
    needed = _needed_arguments(factory)
    if needed:
        why = f"{attribute} needs arguments ({', '.join(needed)}) and is called without any"
        raise unusable(name, why)
    return factory


def _needed_arguments(factory: Callable[..., object]) -> list[str]:
    try:
        parameters = signature(factory).parameters.values()
    except (TypeError, ValueError):
        # some classes of extensions have no signature
        return []
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _unknown(name: str) -> str:
    known = sorted(SUBJECTS)
    near = nearest(name, known)
    hint = f"; did you mean {near!r}?" if near else ""
    allowed = ", ".join(known)
    return f"there is no subject {name!r}; known are {allowed}, or `module:object`{hint}"
