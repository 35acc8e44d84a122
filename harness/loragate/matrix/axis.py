"""The declaration of an axis of the matrix, and what follows from it. Pure.

The declarations are annotations of the fields of `Case`. The YAML schema, ids, the rules about
sites, samples and what subjects promise are all derived from them: a new axis is one new field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum, StrEnum, auto
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, get_args, get_type_hints


class Unstated(Enum):
    """What a subject is assumed to support of an axis that its capabilities do not mention."""

    ALL = auto()
    # so that a subject is never run on something that did not exist when it was written
    DEFAULT = auto()
    # every subject has to say what it supports
    ERROR = auto()


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: `Annotated[type, Axis(...)]` on a field of `Case`.

    The type of the field is int, a StrEnum, or tuple[int, ...] for a list of integers.
    """

    # in ids; without it the name of the field
    id_name: str | None = None
    # sites that have the axis; None: every site
    sites: frozenset[str] | None = None
    # sites that must name it, although `Case` has a default; without a default every site must
    required_at: frozenset[str] = frozenset()
    # bounds of an integer, or of the integers in a list; rows and sizes are int32 on a device
    minimum: int = 1
    maximum: int = 2**31 - 1
    # site -> its values, where it does not have all values of the type
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unstated: Unstated = Unstated.DEFAULT
    # a value as the start of a sentence, in reasons for a skip; without it "<axis> {} is"
    phrase: str | None = None
    # Ids and samples have contained this axis from the start. A later one must not change them:
    # it enters an id where it does not have its default, and a sample where it has several values.
    original: bool = False
    # sites that do not have the axis, but whose samples were drawn with its default as one more
    # axis: a pairwise sample depends on the number of axes
    constant_at: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DeclaredAxis(Axis):
    """An axis together with the name, type and default of its field."""

    name: str
    kind: Any
    # MISSING where every case must name the axis
    default: Any

    @cached_property
    def label(self) -> str:
        """The name of the axis in ids."""
        return self.id_name or self.name

    def at(self, site: str) -> bool:
        """Whether a site has the axis."""
        return self.sites is None or site in self.sites

    def is_required_at(self, site: str) -> bool:
        return self.at(site) and (self.default is MISSING or site in self.required_at)

    def is_sampled_at(self, site: str) -> bool:
        return self.at(site) or site in self.constant_at

    def enters_id(self, value: object) -> bool:
        """Whether the ids of the sites that have the axis contain a value."""
        return self.original or value != self.default

    @cached_property
    def is_list(self) -> bool:
        """Whether one value of the axis is a list."""
        return bool(get_args(self.kind))

    @cached_property
    def members(self) -> tuple[StrEnum, ...]:
        """All values of a StrEnum, none for another type."""
        is_enum = isinstance(self.kind, type) and issubclass(self.kind, StrEnum)
        return tuple(self.kind) if is_enum else ()

    def is_value(self, value: object) -> bool:
        """Whether a value is of the type of the axis."""
        if self.members:
            return value in self.members
        return isinstance(value, tuple if self.is_list else int)

    def allowed(self, site: str | None = None) -> str:
        """The values that the axis may have, for an error message."""
        if self.members:
            return ", ".join(self.values.get(site, self.members) if site else self.members)
        bounds = f"from {self.minimum} to {self.maximum}"
        if self.is_list:
            return f"a list of integers {bounds}, such as [48, 16, 16]"
        return f"an integer {bounds}"

    def text(self, value: Any) -> str:
        """A value as an id contains it."""
        return "x".join(map(str, value)) if self.is_list else str(value)

    def sentence(self, value: Any, predicate: str) -> str:
        """A sentence about a value, such as "rank 600 is above the limit of 512"."""
        start = (self.phrase or f"{self.name} {{}} is").format(self.text(value))
        return f"{start} {predicate}"


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def declared_axes(cases: type[_Dataclass]) -> Mapping[str, DeclaredAxis]:
    """The axes that the fields of a dataclass declare, by name and in the order of the fields.

    Raises TypeError for a type that no axis can have, ValueError if two axes share a name in ids.
    """
    hints = get_type_hints(cases, include_extras=True)
    axes: dict[str, DeclaredAxis] = {}
    for of_case in fields(cases):
        kind, *extras = get_args(hints[of_case.name]) or (None,)
        declared = next((extra for extra in extras if isinstance(extra, Axis)), None)
        if declared is not None:
            axes[of_case.name] = _complete(declared, of_case, kind)
    names = [axis.label for axis in axes.values()]
    if len(set(names)) < len(names):
        raise ValueError(f"two axes have the same name in ids: {', '.join(names)}")
    return MappingProxyType(axes)


def _complete(declared: Axis, of_case: Field[Any], kind: Any) -> DeclaredAxis:
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    if not is_enum and kind not in (int, tuple[int, ...]):
        raise TypeError(
            f"axis {of_case.name}: given {kind}; allowed: int, tuple[int, ...], StrEnum"
        )
    return DeclaredAxis(**vars(declared), name=of_case.name, kind=kind, default=of_case.default)
