"""`loragate merge REPORT...`: one report out of those of the shards of a run, and its verdict."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from loragate.core.arguments import path_of
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.core.versions import new_run_name
from loragate.events.log import EventWriter, read_events
from loragate.events.model import Event, Note
from loragate.records.recorder import Recorder
from loragate.report.merge import merged_events
from loragate.report.record import origin, outcome, section_of
from loragate.report.shard_reports import MergeError, ShardReport, check_one_record, gaps
from loragate.report.summary import Summary
from loragate.report.terminal import colour_for, render_summary
from loragate.report.write import append_step_summary, write_report
from loragate.run.folder import EVENTS, LOGS, clear_folder, hold_folder
from loragate.run.run_record import unwritten


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("merge", help="one report out of those of the shards of a run")
    parser.add_argument(
        "folders", nargs="+", type=path_of, metavar="REPORT", help="the folder of a shard's report"
    )
    parser.add_argument(
        "--report", type=path_of, default=Path("report"), metavar="DIR", help="default: report"
    )
    parser.add_argument(
        "--record",
        type=path_of,
        metavar="FILE",
        help="write counts, verdict and times to FILE, as those of one run",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    report: Path = arguments.report.absolute()
    name = new_run_name()
    with usage_errors():
        shards = _read(arguments.folders, report)
        events = merged_events(shards, run=name)
        recorder = _open_record(arguments.record, shards)
    try:
        summary = _write(events, name, report, arguments.folders, shards)
    except OSError as error:
        raise CommandError(unwritten(report, error), ExitCode.INFRASTRUCTURE) from error
    say(render_summary(summary, colour_for(sys.stdout, os.environ)))
    say(f"report: {report}")
    if recorder is not None:
        _record(recorder, summary, shards)
    return summary.exit_code


def _read(folders: Sequence[Path], report: Path) -> tuple[ShardReport, ...]:
    """Raises ValueError."""
    if report.resolve() in {folder.resolve() for folder in folders}:
        raise MergeError(f"--report {report}: is the report of a shard; name another folder")
    logs = [f"{LOGS}/{number}" for number in range(1, len(folders) + 1)]
    return tuple(
        ShardReport(str(folder), read_events(folder / EVENTS), log)
        for folder, log in zip(folders, logs, strict=True)
    )


def _open_record(path: Path | None, shards: Sequence[ShardReport]) -> Recorder | None:
    """None without a file. Raises ValueError."""
    if path is None:
        return None
    check_one_record(shards)
    plan = shards[0].plan
    return Recorder.open(
        path, section_of(plan.subjects, draws=len(plan.draws), repeats=plan.repeats)
    )


def _record(recorder: Recorder, summary: Summary, shards: Sequence[ShardReport]) -> None:
    if lacking := [*gaps(shards)]:
        print(f"{recorder.path} stays as it was: {'; '.join(lacking)}", file=sys.stderr)
        return
    assert summary.plan is not None, "the plan of each shard was read"
    recorder.save(outcome(summary) | {"shards": len(shards)}, origin=origin(summary.plan))
    say(f"recorded as {recorder.section} in {recorder.path}")


def _copy_logs(logs: Path, target: Path) -> tuple[str, ...]:
    """What could not be copied, and why."""
    try:
        if logs.is_dir():
            shutil.copytree(logs, target)
    except shutil.Error as error:
        return tuple(f"{path}: was not copied: {why}" for path, _, why in error.args[0])
    return ()


def _write(
    events: Sequence[Event],
    name: str,
    report: Path,
    folders: Sequence[Path],
    shards: Sequence[ShardReport],
) -> Summary:
    """Raises OSError, and CommandError if another run writes to the folder."""
    with hold_folder(report):
        clear_folder(report)
        with EventWriter(report / EVENTS, run=name) as writer:
            for event in events:
                writer.write(event)
            for folder, shard in zip(folders, shards, strict=True):
                for problem in _copy_logs(folder / LOGS, report / shard.logs / LOGS):
                    writer.write(Note(text=problem))
        summary = write_report(report / EVENTS, report)
    append_step_summary(summary, report, os.environ)
    return summary
