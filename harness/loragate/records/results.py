"""Recorded runs: one JSON file a machine, one section a kind of run.

Invariant: a section is replaced as a whole and atomically; a reader never sees half a record.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from loragate.core.checkout import Tree, commit_and_tree, project_root
from loragate.core.machine import Machine
from loragate.core.versions import host, utc_now, versions

SCHEMA = 1
# where the interpreter lies is nobody's business in a file that is published
_HOST_FACTS = ("system", "processor", "cores")


class ResultsError(ValueError):
    """A results file that cannot be read or extended; names the file."""


def read_section(path: Path, name: str) -> dict[str, Any] | None:
    """A recorded section, or None if it was never recorded. Raises ResultsError."""
    section: dict[str, Any] | None = _read(path)["sections"].get(name)
    return section


def update_section(path: Path, name: str, payload: Mapping[str, Any]) -> None:
    """Put `payload` in the place of section `name`; other sections stay, those too that another
    run writes at the same time. Raises ResultsError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(path):
        document = _read(path)
        document["schema"] = SCHEMA
        document["sections"][name] = dict(payload)
        _replace(path, document)


def _lock_of(path: Path) -> FileLock:
    # not beside the record, where the file would stay behind and may lie on a network
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"loragate-{os.getuid()}-{name}.lock")


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def provenance(
    machine: Machine,
    *,
    commit: str | None = None,
    checkout: tuple[str, Tree] | None = None,
) -> dict[str, Any]:
    """What a section needs to be believed later: code, versions, machine, time.

    commit: for a tree that was copied without its history; its state is then unknown.
    checkout: as `commit_and_tree` found it when the run began; code may be edited during a run.
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
            "driver": _driver(),
            "compute_capability": list(capability) if capability else None,
            "num_sms": machine.num_sms,
            "memory_bytes": machine.memory_bytes,
        },
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {"schema": SCHEMA, "sections": {}}
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(document, dict) or not isinstance(document.get("sections"), dict):
        raise ResultsError(f"{path}: not a results file: there is no object named 'sections'")
    schema = document.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ResultsError(
            f"{path}: schema is {document.get('schema')!r}, this version reads 1 to {SCHEMA}"
        )
    return document


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
