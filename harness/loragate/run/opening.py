"""The events that a run begins with: its plan, notes, and the findings known of its subjects."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.checkout import commit_and_tree, data_root, project_root
from loragate.core.gpus import driver_version, list_gpus, mps_runs, visible_gpus
from loragate.core.machine import Machine
from loragate.core.versions import host, utc_now, versions
from loragate.events.model import (
    COMPILE_SITE,
    Event,
    Expected,
    KnownFinding,
    Note,
    RunStarted,
    Sharding,
    ShardPart,
)
from loragate.findings.load import own_findings
from loragate.matrix.load import default_files
from loragate.matrix.plan import Plan
from loragate.matrix.selection import Selection
from loragate.run.planning import expected_results, plan_selection, skipped_cases
from loragate.run.preflight import check_caches


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run to be opened.

    `leg` runs the cases of `selection`, of which `only` keeps some (None: all). `expected` are the
    results of the other `legs`. Changes to `record`, the results file of
    the run, do not make the tree dirty. `other_shards` are the legs of the other shards with the
    results that are expected besides those of cases.
    """

    run: str
    selection: Selection
    leg: str
    legs: tuple[str, ...]
    only: frozenset[str] | None = None
    expected: tuple[Expected, ...] = ()
    record: Path | None = None
    other_shards: tuple[ShardPart, ...] = ()


def opening_events(request: RunRequest) -> Iterator[Event]:
    """RunStarted, then notes and known findings. Raises ValueError for errors of the user,
    and CommandError where this machine cannot run it.

    Imports torch and the subjects; `opening_process` does the same in a process of its own.
    """
    selection = request.selection
    made, abilities = plan_selection(selection)
    compiled = {row.subject for row in request.expected if row.site == COMPILE_SITE}
    for name in selection.subjects:
        check_caches(name, made.machine, cross_compiled=name in compiled)
    unusable = {name: have for name, have in abilities.items() if isinstance(have, str)}
    only, sharding = _share(request, made, unusable.keys())
    expected = expected_results(made, leg=request.leg, unusable=unusable.keys(), only=only)
    commit, tree = commit_and_tree(project_root(), ignoring=request.record)
    yield RunStarted(
        run=request.run,
        started_at=utc_now(),
        tier=selection.tier,
        subjects=selection.subjects,
        legs=request.legs,
        expected=(*expected, *request.expected),
        skipped=skipped_cases(made, unusable=unusable.keys(), only=only),
        draws=selection.draws,
        repeats=selection.repeats,
        patterns=selection.patterns,
        once=tuple(sorted(made.once)),
        matrix=_named_files(selection.matrix),
        commit=commit,
        tree=tree,
        versions=versions(),
        machine={**host(), **_device(made.machine)},
        shard=sharding,
        judged=made.digest,
    )
    for name, reason in unusable.items():
        yield Note(text=f"subject {name} can run nothing here: {reason}")
    yield from _known_findings(selection.subjects)


def _share(
    request: RunRequest, made: Plan, unusable: Collection[str]
) -> tuple[frozenset[str] | None, Sharding | None]:
    """The run ids that count here (None: all), and what the other shards have to deliver."""
    shard = request.selection.shard
    if shard is None:
        return request.only, None
    parts = shard.parts(made.run_ids)
    others = []
    for other in request.other_shards:
        cases = expected_results(
            made, leg=request.leg, unusable=unusable, only=parts[other.index - 1]
        )
        others.append(replace(other, expected=(*cases, *other.expected)))
    mine = parts[shard.index - 1]
    only = mine if request.only is None else mine & request.only
    return only, Sharding(index=shard.index, count=shard.count, others=tuple(others))


def _named_files(matrix: tuple[Path, ...]) -> tuple[str, ...]:
    """The case files as a record names them; none for those of the project."""
    return () if matrix == default_files(data_root()) else tuple(map(_published, matrix))


def _published(file: Path) -> str:
    # the path of the project on this disk is left out: a record is published
    path, root = file.resolve(), project_root().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _known_findings(subjects: Collection[str]) -> Iterator[KnownFinding]:
    found = versions()
    for finding in own_findings():
        for name in finding.subjects if finding.case is not None else ():
            if name in subjects:
                version = found.get(finding.subject, "")
                yield KnownFinding(finding=finding.of(name), version=version)


def _device(machine: Machine) -> Mapping[str, str]:
    capability = machine.compute_capability
    return {
        "device": machine.device,
        "device_name": machine.name,
        "compute_capability": ".".join(map(str, capability)) if capability else "",
        "device_memory_bytes": str(machine.memory_bytes),
        "num_sms": str(machine.num_sms),
        "driver": driver_version() or "",
        "mps": "on" if machine.device == "cuda" and mps_runs(os.environ) else "",
        "gpus": _gpus(machine),
    }


def _gpus(machine: Machine) -> str:
    """How many GPUs the workers of a run share; empty without one."""
    if machine.device != "cuda":
        return ""
    return str(len(visible_gpus(os.environ, list_gpus(os.environ))))
