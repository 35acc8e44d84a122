"""The subjects that come with the harness. A subject of your own is named `module:object`.

A subject is imported when it is asked for: a missing package is nobody else's concern.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from types import MappingProxyType
from typing import cast

from loragate.protocol import Subject

SUBJECTS = MappingProxyType(
    {
        "lorakernels": "loragate.subjects.lorakernels.subject:LoraKernelsSubject",
        "torch": "loragate.subjects.torch.subject:TorchSubject",
        "vllm": "loragate.subjects.vllm.subject:VllmSubject",
    }
)


def find_subject(name: str) -> Subject:
    """The subject of that name, made anew.

    `module:object`: `object` is a class or a function that gives a subject without arguments.
    Raises ValueError for a name that leads nowhere, ImportError where a package is missing.
    """
    target = SUBJECTS.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(_unknown(name))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"subject {name!r}: there is no module {error.name!r}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"subject {name!r}: {module_name} has no callable {attribute!r}")
    return cast(Subject, factory())


def _unknown(name: str) -> str:
    known = sorted(SUBJECTS)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    allowed = ", ".join(known)
    return f"there is no subject {name!r}; known are {allowed}, or `module:object`{hint}"
