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
        sample: {limit: 40}             # few points of each row that cover every allowed pair

A file is checked layer by layer (file, group, row), so that an error in one place hides none in
another. Every field's description is the text that a user sees as "allowed".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import GenericAlias
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    create_model,
)

from loragate.core.verdict import OracleName
from loragate.matrix.axis import DeclaredAxis
from loragate.matrix.case import AXES, Site, Tier
from loragate.matrix.document import Document, Loc
from loragate.matrix.validation import shown, validate

T = TypeVar("T")


def _as_values(value: object) -> object:
    """An axis is one value or a list of values."""
    return tuple(value) if isinstance(value, list) else (value,)


def _is_nested(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, list) for item in value)


def _as_lists(value: object) -> object:
    """One value of `slices` is itself a list; a list of lists is a list of values."""
    if isinstance(value, list) and _is_nested(value):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return (tuple(value),) if isinstance(value, list) else (value,)


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ValueError(f"given {shown(repeated[0])} twice; allowed: each value once")
    return values


# a day
_MOST_SECONDS = 86_400
Positive = Annotated[int, Strict(), Field(ge=1)]
# yaml has no tuples, and strict floats refuse the text "1e-3"
Seconds = Annotated[float, Strict(), Field(gt=0, le=_MOST_SECONDS, allow_inf_nan=False)]
OracleNames = Annotated[tuple[OracleName, ...], Field(min_length=1), AfterValidator(_distinct)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _values_of(axis: DeclaredAxis) -> Any:
    """The type of an axis in a row: a tuple of its values, each of them once."""
    value: Any = axis.kind
    if not axis.members:
        value = Annotated[int, Strict(), Field(ge=axis.minimum, le=axis.maximum)]
    if axis.is_list:
        value = Annotated[GenericAlias(tuple, (value, ...)), Field(min_length=1)]
    return Annotated[
        GenericAlias(tuple, (value, ...)),
        Field(min_length=1),
        AfterValidator(_distinct),
        BeforeValidator(_as_lists if axis.is_list else _as_values),
    ]


_FIELDS: dict[str, Any] = {
    name: (_values_of(axis), Field((), description=axis.allowed())) for name, axis in AXES.items()
}
# a row, a default, an exclude or an include: whichever axes it names
AxesModel = create_model("AxesModel", __base__=_Model, **_FIELDS)


class SampleModel(_Model):
    limit: Positive = Field(description="an integer >= 1")


class GroupModel(_Model):
    tier: Tier
    oracles: OracleNames
    rows: list[Any] = Field(min_length=1, description="a list of one row or more")
    timeout_s: Seconds = Field(60.0, description=f"a number of seconds > 0, up to {_MOST_SECONDS}")
    exclude: list[Any] = Field([], description="a list of axes to leave out")
    include: list[Any] = Field([], description="a list of single points to add")
    sample: SampleModel | None = Field(None, description="a mapping such as {limit: 60}")


class FileModel(_Model):
    site: Site
    defaults: dict[str, Any] = Field({}, description="a mapping of axes to single values")
    groups: dict[str, Any] = Field(min_length=1, description="a mapping of group names to groups")


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes that one entry names and, of those, the values that are valid."""

    loc: Loc
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    is_mapping: bool = True

    @property
    def is_valid(self) -> bool:
        return self.is_mapping and self.named == self.values.keys()

    @property
    def is_single(self) -> bool:
        return all(len(values) == 1 for values in self.values.values())


def check_axes(raw: object, loc: Loc, document: Document) -> Axes:
    """Each axis on its own: an invalid one is reported and dropped, the others stay usable."""
    model, bad = validate(AxesModel, raw, loc, document, as_written=_as_written)
    if not isinstance(raw, dict):
        return Axes(loc, is_mapping=False)
    if model is None:
        model = AxesModel.model_validate({k: v for k, v in raw.items() if k not in bad})
    valid = [name for name in AXES if name in model.model_fields_set]
    values = {name: getattr(model, name) for name in valid}
    return Axes(loc, values, frozenset(raw))


def _as_written(loc: Loc, raw: object) -> Loc:
    """`loc` without the list that `_as_lists` put around a single value."""
    axis = AXES.get(str(loc[0])) if loc else None
    if axis and axis.is_list and isinstance(raw, dict) and not _is_nested(raw[axis.name]):
        return (*loc[:1], *loc[2:])
    return loc
