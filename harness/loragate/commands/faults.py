"""`loragate faults`: plant the corpus, one fault at a time, and show what detects it.

Exit codes: 0 every fault that can show here is killed and every control passes, 1 a fault was not
detected or a control failed, 2 none of what was asked for could be planted here, 3 something
could not be planted or run, 4 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from loragate.core.checkout import Tree, commit_and_tree, project_root
from loragate.core.verdict import ExitCode
from loragate.faults.corpus import CONTROLS, FAULTS, SLICE, SLICE_CONTROLS
from loragate.faults.model import Control, Fate, Fault, Needs, Outcome
from loragate.faults.order import Suite
from loragate.faults.record import GPU_SECTION, SECTION, Line, payload, read_faults
from loragate.faults.tables import BAD, render_markdown, render_terminal
from loragate.matrix.plan import is_selected
from loragate.matrix.problems import nearest
from loragate.records.results import ResultsError, provenance, update_section

_JOBS = 2
# many times what a fault takes, for a machine that is busy; a GPU compiles every kernel first
_DEADLINE_S, _GPU_DEADLINE_S = 90.0, 240.0

Planted = TypeVar("Planted", Fault, Control)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "faults", help="plant known faults and check that each is detected"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only faults and controls with this piece in their name, or like this pattern",
    )
    which.add_argument(
        "--slice", action="store_true", help="for each oracle the fault that only it detects"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="compiled kernels: the faults that need a GPU, or whatever --only names",
    )
    parser.add_argument(
        "--baseline-suite",
        action="store_true",
        help="also run tests in the usual style of serving engines on the same faults",
    )
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help="default: 2")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was seen to FILE")
    parser.add_argument("--commit", help="what to record where the tree has no history")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a record as Markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    try:
        if arguments.show:
            return _show(arguments.show)
        faults, controls = select(arguments)
        _check(arguments, faults, controls)
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    if arguments.gpu and not _has_gpu():
        return _complain("--gpu needs a GPU", ExitCode.INFRASTRUCTURE)
    done = _Done(started=commit_and_tree(project_root(), ignoring=arguments.record))
    for one, outcomes in _plant(arguments, faults, controls):
        done.add(one, *outcomes)
        if arguments.record:
            # after each, so that a run that is interrupted has shown something
            try:
                _record(arguments, done, faults, controls)
            except (ResultsError, OSError) as error:
                return _complain(str(error), ExitCode.INFRASTRUCTURE)
    print(render_terminal(done.lines, done.controls))
    if arguments.record:
        print(f"recorded in {arguments.record}")
    if not done.sound:
        return _complain("the baseline suite fails on a control", ExitCode.INFRASTRUCTURE)
    code = exit_code(done.lines, done.controls)
    return _complain("nothing could be planted", code) if code is ExitCode.INCOMPLETE else code


def _check(
    arguments: argparse.Namespace, faults: Sequence[Fault], controls: Sequence[Control]
) -> None:
    """ValueError for what cannot be done."""
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1 (got {arguments.jobs})")
    if arguments.record:
        if arguments.slice:
            raise ValueError("--record takes whole faults; leave out --slice")
        # a file that cannot be read or completed must not cost a finished run
        _kept(arguments, faults, controls)


def exit_code(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> ExitCode:
    fates = {line.outcome.fate for line in lines}
    others = {line.baseline.fate for line in lines if line.baseline}
    alarms = {outcome.fate for _, outcome in controls}
    if Fate.BROKEN in fates | others | alarms:
        return ExitCode.INFRASTRUCTURE
    if fates & set(BAD) or Fate.KILLED in alarms:
        return ExitCode.WRONG
    # controls alone are an answer to who asked for controls, and not to who asked for a fault
    return ExitCode.INCOMPLETE if (fates or alarms) <= {Fate.NOT_RUN} else ExitCode.OK


def select(arguments: argparse.Namespace) -> tuple[list[Fault], list[Control]]:
    """The faults and controls that were asked for; with the baseline suite at least one control,
    because its failures prove nothing unless it passes on sound code. ValueError for an unknown
    name."""
    faults, controls = _asked_for(arguments)
    if arguments.baseline_suite and not controls:
        controls = list(SLICE_CONTROLS)
    return faults, controls


def _asked_for(arguments: argparse.Namespace) -> tuple[list[Fault], list[Control]]:
    if arguments.slice:
        return list(SLICE), list(SLICE_CONTROLS)
    if arguments.gpu and not arguments.only:
        return [fault for fault in FAULTS if fault.needs is Needs.GPU], list(CONTROLS)
    names = [*(fault.name for fault in FAULTS), *(control.name for control in CONTROLS)]
    for pattern in arguments.only:
        if not any(is_selected(name, (pattern,)) for name in names):
            near = nearest(pattern, names)
            hint = f"; did you mean {near}?" if near else ""
            raise ValueError(f"there is no fault or control like {pattern!r}{hint}")
    patterns = tuple(arguments.only)
    return _selected(FAULTS, patterns), _selected(CONTROLS, patterns)


def _selected(planted: Sequence[Planted], patterns: tuple[str, ...]) -> list[Planted]:
    return [one for one in planted if is_selected(one.name, patterns)]


@dataclass(slots=True)
class _Done:
    """What has been planted so far. `sound`: the baseline suite passes on all controls so far.
    `started`: commit and state of the checkout when the first was planted."""

    started: tuple[str, Tree]
    lines: list[Line] = field(default_factory=list)
    controls: list[tuple[Control, Outcome]] = field(default_factory=list)
    sound: bool = True

    def add(self, one: Fault | Control, outcome: Outcome, other: Outcome | None = None) -> None:
        if isinstance(one, Fault):
            self.lines.append(Line(one, outcome, other))
            return
        self.controls.append((one, outcome))
        self.sound = self.sound and (other is None or other.fate is Fate.SURVIVED)

    @property
    def names(self) -> set[str]:
        faults = {line.fault.name for line in self.lines}
        return faults | {control.name for control, _ in self.controls}


def _plant(
    arguments: argparse.Namespace, faults: Sequence[Fault], controls: Sequence[Control]
) -> Generator[tuple[Fault | Control, tuple[Outcome, ...]]]:
    """Each fault and control with its outcome, and that in the baseline suite if it is run."""
    from loragate.faults.runner import Setup, run_all

    deadline = _GPU_DEADLINE_S if arguments.gpu else _DEADLINE_S
    setup = Setup(gpu=arguments.gpu, jobs=arguments.jobs, deadline_s=deadline)
    suites = (Suite.ORACLES, Suite.BASELINE) if arguments.baseline_suite else (Suite.ORACLES,)
    with closing(run_all((*faults, *controls), suites, setup)) as found:
        for one, outcomes in found:
            for suite, outcome in zip(suites, outcomes, strict=True):
                _progress(one, suite, outcome)
            yield one, outcomes


def _record(
    arguments: argparse.Namespace,
    done: _Done,
    faults: Sequence[Fault],
    controls: Sequence[Control],
) -> None:
    """Write what is done, beside what still holds of earlier runs. What was asked for and is not
    done is listed as unfinished."""
    origin = _origin(arguments, done)
    record = payload(done.lines, done.controls, commit=origin["commit"])
    for kind, entries in _kept(arguments, faults, controls, done.names).items():
        record[kind] = entries | record[kind]
    unfinished = _unfinished(arguments, faults, controls, done.names)
    if unfinished:
        record["unfinished"] = unfinished
    update_section(arguments.record, _section(arguments), origin | record)


def _origin(arguments: argparse.Namespace, done: _Done) -> dict[str, Any]:
    """Each fault copies the code when its turn comes: the commit is the one that was there at
    first, and the tree no longer clean once there was another."""
    from loragate.core.machine import detect_machine

    if not arguments.gpu:
        # what the planted processes saw, whatever else there is
        os.environ["TRITON_INTERPRET"] = "1"
    if commit_and_tree(project_root(), ignoring=arguments.record) != done.started:
        done.started = (done.started[0], Tree.DIRTY)
    return provenance(detect_machine(), commit=arguments.commit, checkout=done.started)


def _kept(
    arguments: argparse.Namespace,
    faults: Sequence[Fault],
    controls: Sequence[Control],
    done: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """What a record keeps of earlier runs: entries of all that is not done, by "faults" and
    "controls". ResultsError if one that --only leaves out has no entry that still holds."""
    old = read_faults(arguments.record, _section(arguments)) or {}
    asked = {fault.name for fault in faults} | {control.name for control in controls}
    kept: dict[str, dict[str, Any]] = {}
    for kind, corpus in _everything(arguments).items():
        entries = old.get(kind, {})
        kept[kind] = {
            planted.name: {"commit": old.get("commit", "")} | entries[planted.name]
            for planted in corpus
            if planted.name not in done
            and entries.get(planted.name, {}).get("digest") == planted.digest
        }
        missing = [p.name for p in corpus if p.name not in asked and p.name not in kept[kind]]
        if missing:
            raise ResultsError(
                f"{arguments.record}: holds nothing that still holds of {len(missing)} {kind} "
                f"that --only leaves out: {', '.join(missing[:3])}"
            )
    return kept


def _unfinished(
    arguments: argparse.Namespace,
    faults: Sequence[Fault],
    controls: Sequence[Control],
    done: Collection[str],
) -> list[str]:
    """What was to be planted and was not, in this run or in an earlier one that was interrupted."""
    asked = [*(fault.name for fault in faults), *(control.name for control in controls)]
    old = read_faults(arguments.record, _section(arguments)) or {}
    there = {one.name for corpus in _everything(arguments).values() for one in corpus}
    earlier = [n for n in old.get("unfinished", ()) if n in there and n not in asked]
    return [name for name in (*asked, *earlier) if name not in done]


def _everything(arguments: argparse.Namespace) -> dict[str, Sequence[Fault | Control]]:
    """All that the section of a record is about, by "faults" and "controls"."""
    faults, controls = select(argparse.Namespace(**(vars(arguments) | {"only": []})))
    return {"faults": faults, "controls": controls}


def _section(arguments: argparse.Namespace) -> str:
    return GPU_SECTION if arguments.gpu else SECTION


def _show(path: Path) -> ExitCode:
    record = read_faults(path, SECTION) or read_faults(path, GPU_SECTION)
    if record is None:
        return _complain(f"{path}: no section {SECTION!r}", ExitCode.USAGE)
    print(render_markdown(record))
    if unfinished := record.get("unfinished"):
        which = f"{len(unfinished)} not planted yet: {', '.join(unfinished[:3])}"
        return _complain(f"{path}: the run was interrupted, {which}", ExitCode.INCOMPLETE)
    return ExitCode.OK


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _progress(planted: Fault | Control, suite: Suite, outcome: Outcome) -> None:
    kind = "control" if isinstance(planted, Control) else "fault"
    if suite is Suite.BASELINE:
        kind += " in the baseline suite,"
    found = ", ".join(outcome.killers) or outcome.message[:80]
    line = f"{kind} {planted.name}: {outcome.fate.value} {found}".rstrip()
    print(f"{line} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"loragate faults: {message}", file=sys.stderr)
    return code
