"""What a case file may hold, as pydantic models. Pure; the models live only until `Case` is built.

    site: dense_delta
    defaults: {mix: ragged}             # axes that rows need not repeat, one value each
    groups:
      small:                            # a name for people; it enters no id
        tier: smoke
        oracles: [reference, exact]
        timeout_s: 60                   # of one case, with all its oracles
        rows:                           # lists multiply within a row, rows add up
          - {tokens: [1, 17], in_features: 48, slices: [[33], [48, 16, 16]], rank: 8, ...}
        exclude:                        # points that have one of these values on each of the axes
          - {tokens: 1, slices: [33]}
        include:                        # single points, whatever is excluded
          - {tokens: 1, in_features: 100, slices: [33], rank: 512, ...}
        sample: {limit: 40}             # few points of each row that hold every allowed pair

A file is checked layer by layer (file, group, row), so that an error in one place hides none in
another. Every field's description is the text that a user sees as "allowed".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from loragate.core.verdict import OracleName
from loragate.matrix.case import (
    Dtype,
    Execution,
    ExpertMap,
    Layout,
    Mix,
    Parallel,
    Path,
    Quantisation,
    Ranks,
    RouterWeights,
    Routing,
    Sharing,
    Site,
    Source,
    Tier,
    Write,
)
from loragate.matrix.document import Document, Loc
from loragate.matrix.problems import Problem, describe, nearest

MAX_RANK = 512
MAX_SLOTS = 256
# ranks of a group, either way
MAX_TP = 64
MAX_EXPERTS = 1024
MAX_TOP_K = 64

T = TypeVar("T")


def _as_values(value: object) -> object:
    """An axis is one value or a list of values."""
    return tuple(value) if isinstance(value, list) else (value,)


def _is_nested(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, list) for item in value)


def _as_slices(value: object) -> object:
    """One value of `slices` is itself a list; a list of lists is a list of values."""
    if isinstance(value, list) and _is_nested(value):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return (tuple(value),) if isinstance(value, list) else (value,)


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ValueError(f"given {_shown(repeated[0])} twice; allowed: each value once")
    return values


Axis = Annotated[
    tuple[T, ...], Field(min_length=1), AfterValidator(_distinct), BeforeValidator(_as_values)
]
Natural = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Rank = Annotated[int, Strict(), Field(ge=1, le=MAX_RANK)]
Slots = Annotated[int, Strict(), Field(ge=1, le=MAX_SLOTS)]
Experts = Annotated[int, Strict(), Field(ge=1, le=MAX_EXPERTS)]
TopK = Annotated[int, Strict(), Field(ge=1, le=MAX_TOP_K)]
GroupSize = Annotated[int, Strict(), Field(ge=1, le=MAX_TP)]
Widths = Annotated[tuple[Positive, ...], Field(min_length=1)]
SlicesAxis = Annotated[
    tuple[Widths, ...], Field(min_length=1), AfterValidator(_distinct), BeforeValidator(_as_slices)
]
# yaml has no tuples, and strict floats refuse the text "1e-3"
Seconds = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
OracleNames = Annotated[tuple[OracleName, ...], Field(min_length=1), AfterValidator(_distinct)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AxesModel(_Model):
    """A row, a default, an exclude or an include: whichever axes it names."""

    tokens: Axis[Natural] = Field((), description="an integer >= 0")
    in_features: Axis[Positive] = Field((), description="an integer >= 1")
    slices: SlicesAxis = Field((), description="a list of integers >= 1, such as [48, 16, 16]")
    rank: Axis[Rank] = Field((), description=f"an integer from 1 to {MAX_RANK}")
    slots: Axis[Slots] = Field((), description=f"an integer from 1 to {MAX_SLOTS}")
    dtype: Axis[Dtype] = ()
    mix: Axis[Mix] = ()
    ranks: Axis[Ranks] = ()
    layout: Axis[Layout] = ()
    execution: Axis[Execution] = ()
    parallel: Axis[Parallel] = ()
    tp: Axis[GroupSize] = Field((), description=f"an integer from 1 to {MAX_TP}")
    experts: Axis[Experts] = Field((), description=f"an integer from 1 to {MAX_EXPERTS}")
    top_k: Axis[TopK] = Field((), description=f"an integer from 1 to {MAX_TOP_K}")
    source: Axis[Source] = ()
    routing: Axis[Routing] = ()
    expert_map: Axis[ExpertMap] = ()
    sharing: Axis[Sharing] = ()
    router: Axis[RouterWeights] = ()
    write: Axis[Write] = ()
    path: Axis[Path] = ()
    ep: Axis[GroupSize] = Field((), description=f"an integer from 1 to {MAX_TP}")
    quantisation: Axis[Quantisation] = ()


class SampleModel(_Model):
    limit: Positive = Field(description="an integer >= 1")


class GroupModel(_Model):
    tier: Tier
    oracles: OracleNames
    rows: list[Any] = Field(min_length=1, description="a list of one row or more")
    timeout_s: Seconds = Field(60.0, description="a number of seconds > 0")
    exclude: list[Any] = Field([], description="a list of axes to leave out")
    include: list[Any] = Field([], description="a list of single points to add")
    sample: SampleModel | None = Field(None, description="a mapping such as {limit: 60}")


class FileModel(_Model):
    site: Site
    defaults: dict[str, Any] = Field({}, description="a mapping of axes to single values")
    groups: dict[str, Any] = Field(min_length=1, description="a mapping of group names to groups")


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes that one entry names and, of those, the values that are sound."""

    loc: Loc
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    is_mapping: bool = True

    @property
    def is_sound(self) -> bool:
        return self.is_mapping and self.named == self.values.keys()

    @property
    def is_single(self) -> bool:
        return all(len(values) == 1 for values in self.values.values())


Model = TypeVar("Model", bound=BaseModel)


def check(model: type[Model], raw: object, loc: Loc, document: Document) -> Model | None:
    """The validated model, or None after its problems have been added to the document."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        document.problems.extend(_problems(model, error, raw, loc, document))
        return None


def check_axes(raw: object, loc: Loc, document: Document) -> Axes:
    """Each axis on its own: a bad one is told and dropped, the others stay usable."""
    try:
        model = AxesModel.model_validate(raw)
    except ValidationError as error:
        document.problems.extend(_problems(AxesModel, error, raw, loc, document))
        if not isinstance(raw, dict):
            return Axes(loc, is_mapping=False)
        bad = {details["loc"][0] for details in error.errors()}
        model = AxesModel.model_validate({k: v for k, v in raw.items() if k not in bad})
    assert isinstance(raw, dict)
    sound = [name for name in AxesModel.model_fields if name in model.model_fields_set]
    values = {name: getattr(model, name) for name in sound}
    return Axes(loc, values, frozenset(raw))


def _problems(
    model: type[BaseModel], error: ValidationError, raw: object, loc: Loc, document: Document
) -> Iterator[Problem]:
    errors = error.errors(include_url=False)
    for details in errors:
        here = details["loc"]
        # a list whose only item is bad also counts as empty; the item says it better
        if any(other["loc"][: len(here)] == here != other["loc"] for other in errors):
            continue
        place = (*loc, *_as_written(details["loc"], raw))
        yield document.problem(place, _message(model, details, document, place))


def _as_written(loc: Loc, raw: object) -> Loc:
    """`loc` without the list that `_as_slices` put around a single value."""
    if isinstance(raw, dict) and loc[:1] == ("slices",) and not _is_nested(raw["slices"]):
        return (*loc[:1], *loc[2:])
    return loc


def _message(model: type[BaseModel], details: ErrorDetails, document: Document, place: Loc) -> str:
    name = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "missing":
        return f"is missing; allowed: {allowed_values(model, details['loc'])}"
    if details["type"] == "extra_forbidden":
        fields = tuple(_innermost(model, details["loc"][:-1]).model_fields)
        key = str(details["loc"][-1])
        return describe(f"unknown key {key!r}", ", ".join(fields), nearest(key, fields))
    if not name or details["type"] == "model_type":
        fields = tuple(_innermost(model, details["loc"]).model_fields)
        return describe(_shown(details["input"]), f"a mapping with keys of {', '.join(fields)}")
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    words = _words(_field(model, details["loc"]))
    return describe(
        _shown(details["input"]),
        allowed_values(model, details["loc"]),
        nearest(details["input"], words),
        document.scalar_note(place),
    )


def allowed_values(model: type[BaseModel], loc: Loc) -> str:
    """What a field may hold, in the user's words."""
    info = _field(model, loc)
    words = _words(info)
    if info.description is not None:
        return info.description
    return ", ".join(words) if words else "a mapping"


def _words(info: FieldInfo) -> tuple[str, ...]:
    enum = next((t for t in _leaves(info.annotation) if issubclass(t, StrEnum)), None)
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


def _shown(value: object) -> str:
    """A value as the user would write it."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None:
        return "nothing"
    return repr(value)
