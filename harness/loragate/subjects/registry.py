"""The subjects that come with the harness, and which legs of the gate belong to each.

A subject of your own needs no entry: it is named `module:object`. Nothing is imported before it is
asked for, so that a missing package concerns only those who asked for its subject; this module
imports no torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

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


SUBJECTS: Mapping[str, RegisteredSubject] = MappingProxyType(
    {
        subject.name: subject
        for subject in (
            RegisteredSubject(
                name="lorakernels",
                target="loragate.subjects.lorakernels.subject:LoraKernelsSubject",
                launches="lorakernels.specs:launches",
                # adapters, slots, partition and plans
                host_tests=("tests/kernels", "tests/adapters", "tests/moe"),
            ),
            RegisteredSubject(
                name="torch",
                target="loragate.subjects.torch.subject:TorchSubject",
            ),
            RegisteredSubject(
                name="vllm",
                target="loragate.subjects.vllm.subject:VllmSubject",
                findings=True,
            ),
        )
    }
)


def find_subject(name: str) -> Subject:
    """A new subject of that name.

    `module:object`: `object` is a class or a function that gives a subject without arguments.
    The module is found through PYTHONPATH or in the current folder, whichever command asks for it.
    Raises ValueError for a name that leads nowhere, ImportError where a package is missing.
    """
    check_subject_name(name)
    registered = SUBJECTS.get(name)
    module_name, _, attribute = (registered.target if registered else name).partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(_no_module(name, error.name)) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"subject {name!r}: {module_name} has no callable {attribute!r}")
    return cast("Subject", factory())


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
        raise ValueError(_no_module(name, package))


def _no_module(name: str, module: str) -> str:
    where = "in the current folder or in PYTHONPATH"
    return f"subject {name!r}: there is no module {module!r} {where}"


def _unknown(name: str) -> str:
    known = sorted(SUBJECTS)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    allowed = ", ".join(known)
    return f"there is no subject {name!r}; known are {allowed}, or `module:object`{hint}"
