"""Problems of a document that pydantic finds, in the terms of the file. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from loragate.matrix.document import Document, Loc
from loragate.matrix.problems import describe, nearest

Model = TypeVar("Model", bound=BaseModel)


def check(model: type[Model], raw: object, loc: Loc, document: Document) -> Model | None:
    """The validated model, or None after its problems have been added to the document."""
    return validate(model, raw, loc, document)[0]


def validate(
    model: type[Model],
    raw: object,
    loc: Loc,
    document: Document,
    *,
    as_written: Callable[[Loc, object], Loc] = lambda loc, raw: loc,
) -> tuple[Model | None, frozenset[str | int]]:
    """The validated model and no fields, or None and the fields that are invalid.

    `as_written` maps the place of an error in what was validated to its place in `raw`.
    """
    try:
        return model.model_validate(raw), frozenset()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for details in errors:
        here = details["loc"]
        # a list whose only item is bad also counts as empty; the error of the item is clearer
        if any(other["loc"][: len(here)] == here != other["loc"] for other in errors):
            continue
        place = (*loc, *as_written(here, raw))
        message = _message(model, details, document, place)
        document.problems.append(document.problem(place, message))
    return None, frozenset(details["loc"][0] for details in errors if details["loc"])


def shown(value: object) -> str:
    """A value as the user would write it."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "nothing"
    return repr(value)


def _message(model: type[BaseModel], details: ErrorDetails, document: Document, place: Loc) -> str:
    name = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "missing":
        return f"is missing; allowed: {_allowed(_field(model, details['loc']))}"
    if details["type"] == "extra_forbidden":
        fields = tuple(_innermost(model, details["loc"][:-1]).model_fields)
        key = str(details["loc"][-1])
        return describe(f"unknown key {key!r}", ", ".join(fields), nearest(key, fields))
    if not name or details["type"] == "model_type":
        fields = tuple(_innermost(model, details["loc"]).model_fields)
        return describe(shown(details["input"]), f"a mapping with keys of {', '.join(fields)}")
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    field = _field(model, details["loc"])
    return describe(
        shown(details["input"]),
        _allowed(field),
        nearest(details["input"], _members(field)),
        document.scalar_note(place),
    )


def _allowed(field: FieldInfo) -> str:
    """What a field may hold."""
    if field.description is not None:
        return field.description
    return ", ".join(_members(field)) or "a mapping"


def _members(field: FieldInfo) -> tuple[str, ...]:
    """The values of a field that holds a StrEnum."""
    enum = next((t for t in _leaves(field.annotation) if issubclass(t, StrEnum)), None)
    return tuple(member.value for member in enum) if enum else ()


def _leaves(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _leaves(argument)


def _field(model: type[BaseModel], loc: Iterable[str | int]) -> FieldInfo:
    *outer, name = [step for step in loc if isinstance(step, str)]
    return _innermost(model, outer).model_fields[name]


def _innermost(model: type[BaseModel], loc: Iterable[str | int]) -> type[BaseModel]:
    for step in loc:
        inner = _leaves(model.model_fields[step].annotation) if isinstance(step, str) else ()
        model = next((t for t in inner if issubclass(t, BaseModel)), model)
    return model
