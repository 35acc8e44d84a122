"""Arguments that are members of an enum. A string with the name of a member is none: compared by
identity, it would silently mean another member. Pure; no torch."""

from __future__ import annotations

from enum import Enum


def check_choice(name: str, given: object, kind: type[Enum]) -> None:
    """ValueError that names the argument, unless `given` is a member of `kind`."""
    if not isinstance(given, kind):
        allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise ValueError(f"{name} must be one of {allowed} (got {given!r})")


def choice_number(name: str, given: Enum | None, kind: type[Enum]) -> int:
    """The value of a choice as an operator takes it; 0 for None, which leaves it to the plan.
    ValueError as `check_choice`."""
    if given is None:
        return 0
    check_choice(name, given, kind)
    number: int = given.value
    return number
