"""What must detect each fault and pass with each control, as killers.yaml says.

The file maps names of faults to lists of killers, and names of controls to lists of items. A case
of a fault without `by` is shown to it and need not detect it:

    faults:
      a-fault:
      - case: dense_delta.dtype-bf16...
        by: [reference, exact]
      - test: tests/kernels/test_batch_metadata.py::test_rows_are_sorted
      - launch: qkv-bf16-r1-t512
    controls:
      a-control:
      - case: dense_delta.dtype-bf16...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from loragate.core.verdict import Failure, OracleName
from loragate.faults.model import GateItem, Killer, Part

_PATH = Path(__file__).with_name("killers.yaml")
_KEYS = {"case": Part.CASE, "test": Part.HOST_TEST, "launch": Part.LAUNCH}


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _Entry:
    case: str = ""
    test: str = ""
    launch: str = ""
    by: tuple[OracleName | Failure, ...] = ()

    @property
    def item(self) -> GateItem:
        """Raises ValueError unless the entry has exactly one of the keys."""
        named = [(part, getattr(self, key)) for key, part in _KEYS.items() if getattr(self, key)]
        if len(named) != 1:
            raise ValueError(f"an entry must have one of {', '.join(_KEYS)} (got {len(named)})")
        return GateItem(*named[0])


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    faults: dict[str, list[_Entry]]
    controls: dict[str, list[_Entry]]


def as_entries(killers: Iterable[Killer]) -> list[dict[str, Any]]:
    """The entries of a fault, as they stand in the file."""
    found: dict[GateItem, list[str]] = {}
    for killer in killers:
        by = [killer.by.value] if killer.by else []
        found.setdefault(killer.item, []).extend(by)
    keys = {part: key for key, part in _KEYS.items()}
    return [
        {keys[item.part]: item.id} | ({"by": names} if names else {})
        for item, names in found.items()
    ]


def as_text(document: Mapping[str, Any]) -> str:
    """A part of the file; ids are too long for lines of a usual width."""
    return yaml.safe_dump(document, sort_keys=False, width=1000, default_flow_style=None)


def _killers(entry: _Entry) -> Iterator[Killer]:
    item = entry.item
    if item.part is not Part.CASE:
        yield Killer(item)
    for by in entry.by:
        yield Killer(item, by)


def _is_shown(entry: _Entry) -> bool:
    return bool(entry.case) and not entry.by


_READ = TypeAdapter(_File).validate_python(yaml.safe_load(_PATH.read_text(encoding="utf-8")))

KILLERS: Mapping[str, tuple[Killer, ...]] = {
    name: tuple(killer for entry in entries for killer in _killers(entry))
    for name, entries in _READ.faults.items()
}
SHOWN: Mapping[str, tuple[GateItem, ...]] = {
    name: tuple(entry.item for entry in entries if _is_shown(entry))
    for name, entries in _READ.faults.items()
}
ITEMS: Mapping[str, tuple[GateItem, ...]] = {
    name: tuple(entry.item for entry in entries) for name, entries in _READ.controls.items()
}
