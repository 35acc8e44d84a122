"""`loragate scan`: spend a budget of time on what may be flaky, and say what was found."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.commands.history import add_history_option, open_named
from loragate.commands.morning import add_page_options, check_report, quarantined, write_morning
from loragate.commands.record_options import add_record_options, open_record
from loragate.commands.selection_options import (
    add_case_options,
    add_matrix_option,
    selection_from,
)
from loragate.core.arguments import count_from
from loragate.core.checkout import branches_and_tags, changed_files, project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.gpu_health import open_health
from loragate.core.gpus import driver_version
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.core.versions import new_run_name
from loragate.events.model import Note, RunStarted
from loragate.history import History, ScanRun
from loragate.matrix.case import Site
from loragate.matrix.case_run import CaseRun
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.load import load_cases
from loragate.matrix.problems import nearest
from loragate.matrix.selection import Selection, select_runs
from loragate.nightly.morning import Morning, day_of
from loragate.nightly.wave import Place
from loragate.records.recorder import Recorder
from loragate.run.gate import gpu_is_visible
from loragate.run.opening import RunRequest
from loragate.run.opening_process import opening_events_of_child
from loragate.scan.clock import RunClock
from loragate.scan.devices import Devices, devices_of
from loragate.scan.figures import SECTION, figures_of
from loragate.scan.processes import Processes
from loragate.scan.scan import Scan, Setup
from loragate.scan.since import cases_changed
from loragate.scan.surroundings import Spent, Surroundings
from loragate.scan.waves import Waves

_UNITS = {"s": 1, "m": 60, "h": 3600}
_BUDGET = re.compile(r"([0-9]{1,6})([smh])")
_MOST_WORKERS = 256
# what the page takes for each trial of the history, and the most of a budget that is left for it
_PAGE_S = 3e-5
_PAGE = 0.1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "scan", help="look for flaky results for a given time, and diagnose them"
    )
    parser.add_argument(
        "--budget", type=_seconds, required=True, metavar="TIME", help="90s, 20m or 2h"
    )
    parser.add_argument(
        "--since",
        metavar="REV",
        help="begin with cases whose source changed since this revision of git",
    )
    parser.add_argument(
        "--workers",
        type=count_from(1, _MOST_WORKERS),
        metavar="N",
        help="processes that run beside each other on the CPU, or on each GPU (default: one per "
        "core; on GPUs as many as fit, at most 8 on each)",
    )
    add_case_options(parser)
    add_matrix_option(parser)
    add_history_option(parser)
    add_page_options(parser)
    add_record_options(parser, "what the scan did and found")
    parser.set_defaults(run=run, draw=None, seeds=None, repeats=1, shard=None)


def run(arguments: argparse.Namespace) -> ExitCode:
    begin = time.monotonic()
    has_gpu = gpu_is_visible()
    selection = selection_from(arguments, has_gpu=has_gpu)
    with usage_errors():
        files = _changed_since(arguments.since)
    check_report(arguments)
    with usage_errors():
        recorder = open_record(arguments, SECTION)
    with _processes(selection) as (processes, folder):
        with usage_errors():
            runs, plan = _planned(selection)
        quarantined(arguments, sorted(runs))
        with open_named(arguments.history, is_made=True) as history:
            changed = None if files is None else cases_changed(runs, history, files)
            clock, devices = _clock(history), _devices(runs, has_gpu=has_gpu)
            setup = _setup(arguments, runs, plan, changed, clock.started, devices)
            # planning and the page are a part of the time that was given
            before = time.monotonic() - begin + _for_page(history, arguments.budget)
            setup = replace(setup, budget_s=setup.budget_s - before)
            around = Surroundings(
                run=setup.run.uid,
                runs=runs,
                history=history,
                processes=processes,
                health=open_health(has_gpu=has_gpu),
                folder=folder,
                clock=clock,
                shares=devices.shares(setup.place.workers),
            )
            done = _scan_and_show(arguments, setup, around)
            if recorder is not None:
                _record(recorder, setup, done, seconds=time.monotonic() - begin)
    return done.page.exit_code


@contextmanager
def _processes(selection: Selection) -> Iterator[tuple[Processes, Path]]:
    """The processes of trials, which import what they need while this one plans, and a folder."""
    with (
        tempfile.TemporaryDirectory(prefix="loragate-scan-") as path,
        Processes(selection.subjects, Path(path) / "log") as processes,
    ):
        processes.prepare()
        yield processes, Path(path)


def _for_page(history: History, budget_s: float) -> float:
    """The time that is left for the page at the end."""
    return min(_PAGE * budget_s, _PAGE_S * history.count())


def _record(recorder: Recorder, setup: Setup, done: _Done, *, seconds: float) -> None:
    slots = setup.place.slots
    recorder.save(
        figures_of(
            setup.run,
            done.scan.trials,
            {state.key: state.status for state in done.page.states},
            cases=len(setup.cases),
            workers=slots,
            seconds=seconds,
            spent={
                "opening": slots * (seconds - done.seconds),
                "starting": done.spent.starting_s,
                "alone": done.spent.alone_s,
            },
            diagnosing=done.spent.diagnosing,
        )
    )
    say(f"recorded in {recorder.path}")


@dataclass(frozen=True, slots=True)
class _Done:
    """`seconds` from the begin of the first wave to the end of the last one."""

    scan: Scan
    spent: Spent
    seconds: float
    page: Morning


def _scan_and_show(arguments: argparse.Namespace, setup: Setup, around: Surroundings) -> _Done:
    history = around.history
    say(f"scan of {len(setup.cases)} cases for {arguments.budget:g} s, history {history.name}")
    history.add_run(setup.run)
    try:
        scan, spent, seconds = _scan(setup, around)
    finally:
        # also after Ctrl-C: what is known by then is kept and shown
        history.add_run(replace(setup.run, finished_at=around.clock()))
        page = write_morning(arguments, history, cases=setup.cases)
    return _Done(scan, spent, seconds, page)


def _scan(setup: Setup, around: Surroundings) -> tuple[Scan, Spent, float]:
    waves = Waves(around)
    try:
        scan = Scan(setup, waves, around.history, say)
        begin = time.monotonic()
        scan.run()
    finally:
        around.health.close()
    return scan, waves.spent, time.monotonic() - begin


def _planned(selection: Selection) -> tuple[dict[str, CaseRun], RunStarted]:
    """The runs that this machine can do, by run id, and the plan."""
    opening = opening_events_of_child(
        RunRequest(run=new_run_name(), selection=selection, leg="scan", legs=("scan",))
    )
    (plan,) = (event for event in opening if isinstance(event, RunStarted))
    for note in opening:
        if isinstance(note, Note):
            say(note.text)
    expected = {name for row in plan.expected for name in row.run_ids}
    runs = select_runs(selection, load_cases(selection.matrix))
    found = {run.run_id: run for run in runs if run.run_id in expected}
    if not found:
        raise CommandError("there is nothing to scan on this machine", ExitCode.INCOMPLETE)
    return found, plan


def _setup(
    arguments: argparse.Namespace,
    runs: dict[str, CaseRun],
    plan: RunStarted,
    changed: frozenset[str] | None,
    started: float,
    devices: Devices,
) -> Setup:
    place = Place(gpus=devices.gpus, workers=arguments.workers or devices.workers())
    return Setup(
        run=ScanRun(
            uid=uuid.uuid4().hex,
            machine=platform.node(),
            started_at=started,
            commit=plan.commit,
            tree=plan.tree.value,
            budget_s=arguments.budget,
            environment=_environment(plan, devices.gpus),
        ),
        cases=tuple(sorted(runs)),
        place=place,
        budget_s=arguments.budget,
        # another order and other combinations every time
        seed=int(started),
        changed=changed,
        only_judged=frozenset(name for name, run in runs.items() if run.case.site is Site.ENGINE),
        large=devices.too_large(
            place.workers, {name: footprint_bytes(run.case) for name, run in runs.items()}
        ),
    )


def _devices(runs: Mapping[str, CaseRun], *, has_gpu: bool) -> Devices:
    largest = max(footprint_bytes(run.case) for run in runs.values())
    return devices_of(os.environ, largest) if has_gpu else Devices()


def _clock(history: History) -> RunClock:
    last = history.last_of(platform.node())
    clock = RunClock(last)
    if last is not None and last > clock.started:
        say(
            f"this machine has recorded trials of {day_of(last)} UTC, which is yet to come: "
            "its clock is wrong now, or was then"
        )
    return clock


def _environment(plan: RunStarted, gpus: tuple[str, ...]) -> dict[str, str]:
    found = {
        **plan.versions,
        "processor": plan.machine.get("processor", ""),
        "cores": plan.machine.get("cores", ""),
        "system": plan.machine.get("system", ""),
        "device": plan.machine.get("device", ""),
        "gpu": plan.machine.get("device_name", ""),
        "gpu_uuids": ", ".join(sorted(gpus)),
        "driver": driver_version() or "",
    }
    return {name: value for name, value in found.items() if value}


def _changed_since(revision: str | None) -> frozenset[str] | None:
    """None where no revision was named. Raises ValueError."""
    if revision is None:
        return None
    root = project_root()
    try:
        return changed_files(root, revision)
    except (OSError, subprocess.SubprocessError) as error:
        near = nearest(revision, branches_and_tags(root))
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"--since {revision!r}: git does not know this revision{hint}") from error


def _seconds(text: str) -> float:
    found = _BUDGET.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a time as 90s, 20m or 2h (got {text!r})")
    return float(int(found[1]) * _UNITS[found[2]])
