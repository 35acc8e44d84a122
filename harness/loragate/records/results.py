"""Recorded runs: one JSON file per machine, one section per kind of run.

Invariant: a section is replaced as a whole and atomically; a reader never sees half a record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loragate.core.checkout import Tree, commit_and_tree, project_root
from loragate.core.files import lock_of, write_atomically
from loragate.core.gpus import driver_version
from loragate.core.json_text import parse_json
from loragate.core.machine import Machine
from loragate.core.versions import host, utc_now, versions

SCHEMA = 1
# the path of the interpreter is left out: the file is published
_HOST_FACTS = ("system", "processor", "cores")

Change = Callable[[dict[str, Any]], Mapping[str, Any] | None]


class ResultsError(ValueError):
    """A results file that cannot be read or extended; names the file."""


def read_section(path: Path, name: str) -> dict[str, Any] | None:
    """A recorded section, or None if it was never recorded. Raises ResultsError."""
    section: dict[str, Any] | None = _read(path)["sections"].get(name)
    return section


def require_section(path: Path, name: str) -> dict[str, Any]:
    """A recorded section. Raises ResultsError, which names the sections that there are."""
    if not path.exists():
        raise ResultsError(f"{path}: no such file")
    sections = _read(path)["sections"]
    if name not in sections:
        recorded = ", ".join(sorted(sections)) or "none"
        raise ResultsError(f"{path}: no section {name!r}; recorded are: {recorded}")
    section: dict[str, Any] = sections[name]
    return section


def sections_of(path: Path, beginning: str) -> list[dict[str, Any]]:
    """The recorded sections whose names begin so, by their names. Raises ResultsError."""
    found = _read(path)["sections"]
    return [found[name] for name in sorted(found) if name.startswith(beginning)]


@contextmanager
def taken_from(where: str) -> Iterator[None]:
    """Within, figures are taken from a record, which may be damaged. Raises ResultsError."""
    try:
        yield
    except ResultsError:
        raise
    except KeyError as error:
        raise ResultsError(f"{where}: no field {error}") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ResultsError(f"{where}: {error}") from error


def update_section(path: Path, name: str, payload: Mapping[str, Any]) -> None:
    """Replace section `name` by `payload`. Other sections stay, including those that another run
    writes at the same time. Raises ResultsError, or OSError if the file cannot be written."""
    change_section(path, name, lambda current: payload)


def change_section(path: Path, name: str, change: Change) -> bool:
    """Replace section `name` by what `change` makes of it: it gets what the section holds, {} if
    that was never recorded, and returns None to leave it. No other run writes meanwhile. Returns
    whether it was replaced. Raises as update_section."""
    with lock_of(path):
        document = _read(path)
        changed = change(dict(document["sections"].get(name, {})))
        if changed is None:
            return False
        document["schema"] = SCHEMA
        document["sections"][name] = dict(changed)
        _write(path, document)
    return True


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
    except ValueError as error:
        raise ResultsError(f"{path}: cannot hold what was found: {error}") from error
    write_atomically(path, text)


def provenance(
    machine: Machine,
    *,
    commit: str | None = None,
    checkout: tuple[str, Tree] | None = None,
) -> dict[str, Any]:
    """Where the figures of a section come from: code, versions, machine, time.

    commit: used for a tree that was copied without its history; its state is then unknown.
    checkout: what `commit_and_tree` returned when the run began; code may be edited during a run.
    """
    found, tree = checkout or commit_and_tree(project_root())
    capability = machine.compute_capability
    return {
        "commit": found or commit or "",
        "tree": tree.value,
        "recorded_at": utc_now(),
        "versions": dict(versions()),
        "machine": {
            **{name: text for name, text in host().items() if name in _HOST_FACTS},
            "device": machine.device,
            "name": machine.name,
            "driver": driver_version(),
            "compute_capability": list(capability) if capability else None,
            "num_sms": machine.num_sms,
            "memory_bytes": machine.memory_bytes,
        },
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {"schema": SCHEMA, "sections": {}}
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    try:
        # otherwise it would be refused only when a finished run is written beside it
        document = parse_json(text, allow_nan=False)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise ResultsError(f"{path}: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("sections"), dict):
        raise ResultsError(f"{path}: not a results file: there is no object named 'sections'")
    schema = document.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ResultsError(
            f"{path}: schema is {document.get('schema')!r}, this version reads 1 to {SCHEMA}"
        )
    for name, section in document["sections"].items():
        if not isinstance(section, dict):
            raise ResultsError(f"{path}: section {name!r} must be an object (got {section!r:.40})")
    return document
