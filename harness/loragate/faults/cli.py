"""`loragate faults`: plant the corpus, one fault at a time, and tell who noticed.

Exit codes: 0 every fault that can show here is killed and every control is green, 1 a fault got
away or a control was called wrong, 2 none of what was asked for could be planted here, 3 something
could not be planted or run, 4 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from loragate.faults.corpus import CONTROLS, FAULTS, SLICE, SLICE_CONTROLS
from loragate.faults.model import Control, Fate, Fault, Needs, Outcome
from loragate.faults.order import Suite
from loragate.faults.tables import BAD, Line, payload, render_markdown, render_terminal
from loragate.matrix.plan import is_selected
from loragate.matrix.problems import nearest
from loragate.results import ResultsError, provenance, read_section, update_section
from loragate.verdict import ExitCode

SECTION, GPU_SECTION = "faults", "faults_gpu"
_JOBS = 2
# many times what a fault takes, for a machine that is busy; a GPU compiles every kernel first
_DEADLINE_S, _GPU_DEADLINE_S = 90.0, 240.0

Planted = TypeVar("Planted", Fault, Control)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("faults", help="plant known faults and see them noticed")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only faults and controls with this piece in their name, or like this pattern",
    )
    which.add_argument(
        "--slice", action="store_true", help="for each oracle the fault that only it notices"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="compiled kernels: the faults that need a GPU, or whatever --only names",
    )
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="let tests in the style of serving engines look for the same faults",
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
        if arguments.jobs < 1:
            raise ValueError(f"--jobs must be at least 1 (got {arguments.jobs})")
        if arguments.record:
            if arguments.slice:
                raise ValueError("--record takes whole faults; leave out --slice")
            # a file that cannot be read or completed must not cost a finished run
            _kept(arguments, faults, controls)
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    if arguments.gpu and not _has_gpu():
        return _complain("--gpu needs a GPU", ExitCode.INFRASTRUCTURE)
    lines, judged, sound = _plant(arguments, faults, controls)
    print(render_terminal(lines, judged))
    if arguments.record:
        try:
            _record(arguments, lines, judged)
        except (ResultsError, OSError) as error:
            return _complain(str(error), ExitCode.INFRASTRUCTURE)
    if not sound:
        return _complain("the stand-in fails on sound code", ExitCode.INFRASTRUCTURE)
    code = exit_code(lines, judged)
    return _complain("nothing could be planted", code) if code is ExitCode.INCOMPLETE else code


def exit_code(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> ExitCode:
    fates = {line.outcome.fate for line in lines}
    others = {line.stand_in.fate for line in lines if line.stand_in}
    alarms = {outcome.fate for _, outcome in controls}
    if Fate.BROKEN in fates | others | alarms:
        return ExitCode.INFRASTRUCTURE
    if fates & set(BAD) or Fate.KILLED in alarms:
        return ExitCode.WRONG
    # controls alone are an answer to who asked for controls, and not to who asked for a fault
    return ExitCode.INCOMPLETE if (fates or alarms) <= {Fate.NOT_RUN} else ExitCode.OK


def select(arguments: argparse.Namespace) -> tuple[list[Fault], list[Control]]:
    """What was asked for, and a control at least where the stand-in is asked: what it fails on
    shows nothing as long as it is not seen to pass. ValueError for a name that nothing has."""
    faults, controls = _asked_for(arguments)
    if arguments.stand_in and not controls:
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


def _plant(
    arguments: argparse.Namespace, faults: Sequence[Fault], controls: Sequence[Control]
) -> tuple[list[Line], list[tuple[Control, Outcome]], bool]:
    """Lines, controls, and whether the stand-in, if it was asked, passes on the controls."""
    from loragate.faults.runner import Setup, run_all

    deadline = _GPU_DEADLINE_S if arguments.gpu else _DEADLINE_S
    setup = Setup(gpu=arguments.gpu, jobs=arguments.jobs, deadline_s=deadline)
    planted: tuple[Fault | Control, ...] = (*faults, *controls)
    outcomes: dict[str, Outcome] = {}
    for one, outcome in run_all(planted, Suite.ORACLES, setup):
        _progress(one, outcome)
        outcomes[one.name] = outcome
    others: dict[str, Outcome] = {}
    if arguments.stand_in:
        for one, outcome in run_all(planted, Suite.UPSTREAM, setup):
            _progress(one, outcome)
            others[one.name] = outcome
    lines = [Line(fault, outcomes[fault.name], others.get(fault.name)) for fault in faults]
    judged = [(control, outcomes[control.name]) for control in controls]
    sound = all(others[control.name].fate is Fate.SURVIVED for control in controls if others)
    return lines, judged, sound


def _record(
    arguments: argparse.Namespace,
    lines: Sequence[Line],
    controls: Sequence[tuple[Control, Outcome]],
) -> None:
    from loragate.machine import detect_machine

    if not arguments.gpu:
        # what the planted processes saw, whatever else there is
        os.environ["TRITON_INTERPRET"] = "1"
    origin = provenance(detect_machine(), commit=arguments.commit)
    record = payload(lines, controls, commit=origin["commit"])
    kept = _kept(arguments, [line.fault for line in lines], [control for control, _ in controls])
    for kind, entries in kept.items():
        record[kind] = entries | record[kind]
    update_section(arguments.record, _section(arguments), origin | record)
    print(f"recorded in {arguments.record}")


def _kept(
    arguments: argparse.Namespace, faults: Sequence[Fault], controls: Sequence[Control]
) -> dict[str, dict[str, Any]]:
    """What a record keeps of earlier runs where only some are planted: entries of the others, by
    "faults" and "controls". ResultsError if one of them has no entry that still holds."""
    old = read_section(arguments.record, _section(arguments))
    if not arguments.only:
        return {}
    all_faults, all_controls = select(argparse.Namespace(**(vars(arguments) | {"only": []})))
    everything: dict[str, Sequence[Fault | Control]]
    everything = {"faults": all_faults, "controls": all_controls}
    kept: dict[str, dict[str, Any]] = {}
    new = {fault.name for fault in faults} | {control.name for control in controls}
    for kind, corpus in everything.items():
        entries = (old or {}).get(kind, {})
        kept[kind] = {
            planted.name: {"commit": (old or {}).get("commit", "")} | entries[planted.name]
            for planted in corpus
            if planted.name not in new
            and entries.get(planted.name, {}).get("digest") == planted.digest
        }
        missing = [p.name for p in corpus if p.name not in new and p.name not in kept[kind]]
        if missing:
            raise ResultsError(
                f"{arguments.record}: holds nothing that still holds of {len(missing)} {kind} "
                f"that --only leaves out: {', '.join(missing[:3])}"
            )
    return kept


def _section(arguments: argparse.Namespace) -> str:
    return GPU_SECTION if arguments.gpu else SECTION


def _show(path: Path) -> ExitCode:
    record = read_section(path, SECTION) or read_section(path, GPU_SECTION)
    if record is None:
        return _complain(f"{path}: no section {SECTION!r}", ExitCode.USAGE)
    print(render_markdown(record))
    return ExitCode.OK


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _progress(planted: Fault | Control, outcome: Outcome) -> None:
    kind = "control" if isinstance(planted, Control) else "fault"
    noticed = ", ".join(outcome.killers) or outcome.message[:80]
    line = f"{kind} {planted.name}: {outcome.fate.value} {noticed}".rstrip()
    print(f"{line} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"loragate faults: {message}", file=sys.stderr)
    return code
