"""`loragate faults`: plant the corpus, one fault at a time, and show what detects it.

Exit codes: 0 every fault that can show here is killed and every control passes, 1 a fault was not
detected or a control failed, 2 none of what was asked for could be planted here, 3 something
could not be planted or run, 4 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from loragate.commands.record_options import add_record_options, open_record
from loragate.core.arguments import path_of
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.core.warm_server import ServerDied
from loragate.faults.corpus import ALONE, CONTROLS, FAULTS, SLICE_CONTROLS
from loragate.faults.corpus.killers import as_entries, as_text
from loragate.faults.model import Control, Fate, Fault, Needs, Outcome
from loragate.faults.order import Suite
from loragate.faults.planting import StaleAnchor
from loragate.faults.record import GPU_SECTION, SECTION, Line, payload, read_faults
from loragate.faults.record_update import FaultRecord, Plantings
from loragate.faults.tables import BAD, render_markdown, render_terminal
from loragate.matrix.patterns import is_selected
from loragate.matrix.problems import nearest
from loragate.records.results import require_section

_JOBS = 2
# many times what a fault takes, for a busy machine; on a GPU every kernel is compiled first
_DEADLINE_S, _GPU_DEADLINE_S = 240.0, 600.0

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
        help="only faults and controls whose name contains this text or matches this pattern",
    )
    which.add_argument(
        "--slice", action="store_true", help="for each oracle, the faults that only it detects"
    )
    which.add_argument(
        "--find-killers",
        nargs="+",
        metavar="NAME",
        help="run cases and host tests of the gate until one detects the fault, for killers.yaml",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="with compiled kernels: the faults that need a GPU, or those that --only names",
    )
    parser.add_argument(
        "--baseline-suite",
        action="store_true",
        help="also run tests in the usual style of serving engines on the same faults",
    )
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help="default: 2")
    add_record_options(parser, "the outcomes")
    parser.add_argument("--show", type=path_of, metavar="FILE", help="print a record as Markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    with usage_errors():
        _refuse_idle_record(arguments)
        if arguments.show:
            return _show(arguments.show)
        if arguments.find_killers:
            return _find_killers(arguments)
        faults, controls = select(arguments)
        record = _open_record(arguments, faults, controls)
    if arguments.gpu and not _has_gpu():
        raise CommandError("--gpu needs a GPU", ExitCode.INFRASTRUCTURE)
    done = _Done()
    for one, outcomes in _plant(arguments, faults, controls):
        done.add(one, *outcomes)
        if record:
            # after each, so that an interrupted run leaves what it has found
            _save(record, done, gpu=arguments.gpu)
    say(render_terminal(done.lines, done.controls))
    if record:
        say(f"recorded in {arguments.record}")
    if not done.sound:
        raise CommandError("the baseline suite fails on a control", ExitCode.INFRASTRUCTURE)
    code = exit_code(done.lines, done.controls)
    if code is ExitCode.INCOMPLETE:
        raise CommandError("nothing could be planted", code)
    return code


def _refuse_idle_record(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a record that nothing would be written to."""
    for option in ("show", "find_killers"):
        if arguments.record and getattr(arguments, option):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} plants nothing to record; leave out --record")


def _find_killers(arguments: argparse.Namespace) -> ExitCode:
    """Print an entry of killers.yaml for each of the faults; 1 if the gate misses one of them."""
    from loragate.core.child_process import ProcessPool
    from loragate.faults.runner import Setup, server_of_faults
    from loragate.faults.search import NotSound, find_killers

    known = {fault.name: fault for fault in FAULTS}
    _check_names(arguments.find_killers, known)
    setup, missed = Setup(gpu=arguments.gpu), False
    prefix = "loragate-servers-"
    with tempfile.TemporaryDirectory(prefix=prefix) as logs, closing(ProcessPool()) as processes:
        server = server_of_faults(processes, Path(logs) / "server.txt", gpu=arguments.gpu)
        for name in arguments.find_killers:
            try:
                found = find_killers(known[name], setup, server)
            except (NotSound, StaleAnchor, ServerDied) as error:
                raise CommandError(f"{name}: {error}", ExitCode.INFRASTRUCTURE) from error
            missed = missed or not found
            say(as_text({name: as_entries(found)}), end="")
    return ExitCode.WRONG if missed else ExitCode.OK


def _open_record(
    arguments: argparse.Namespace, faults: Sequence[Fault], controls: Sequence[Control]
) -> FaultRecord | None:
    """Also checks the arguments: ValueError for what cannot be done."""
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1 (got {arguments.jobs})")
    if arguments.record and arguments.slice:
        raise ValueError("--record takes whole faults; leave out --slice")
    recorder = open_record(arguments, _section(arguments))
    if recorder is None:
        return None
    corpus = select(argparse.Namespace(**(vars(arguments) | {"only": []})))
    return FaultRecord(recorder, Plantings(faults, controls), Plantings(*corpus))


def _save(record: FaultRecord, done: _Done, *, gpu: bool) -> None:
    if not gpu:
        # the machine of the planted processes, whatever else there is
        os.environ["TRITON_INTERPRET"] = "1"
    entries = payload(done.lines, done.controls, commit=record.recorder.commit)
    record.save(entries, done.names)


def exit_code(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> ExitCode:
    fates = {line.outcome.fate for line in lines}
    others = {line.baseline.fate for line in lines if line.baseline}
    alarms = {outcome.fate for _, outcome in controls}
    if Fate.BROKEN in fates | others | alarms:
        return ExitCode.INFRASTRUCTURE
    if fates & set(BAD) or Fate.KILLED in alarms:
        return ExitCode.WRONG
    # controls alone answer a request for controls, not one for a fault that could not be planted
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
        return list(ALONE), list(SLICE_CONTROLS)
    if arguments.gpu and not arguments.only:
        return [fault for fault in FAULTS if fault.needs is Needs.GPU], list(CONTROLS)
    names = [*(fault.name for fault in FAULTS), *(control.name for control in CONTROLS)]
    _check_names(arguments.only, names, as_patterns=True)
    patterns = tuple(arguments.only)
    return _selected(FAULTS, patterns), _selected(CONTROLS, patterns)


def _check_names(
    given: Sequence[str], known: Collection[str], *, as_patterns: bool = False
) -> None:
    """Raises ValueError for the first that selects nothing."""
    for name in given:
        found = any(is_selected(one, (name,)) for one in known) if as_patterns else name in known
        if not found:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise ValueError(f"there is no fault or control like {name!r}{hint}")


def _selected(planted: Sequence[Planted], patterns: tuple[str, ...]) -> list[Planted]:
    return [one for one in planted if is_selected(one.name, patterns)]


@dataclass(slots=True)
class _Done:
    """What has been planted so far. `sound`: the baseline suite passes on all controls so far."""

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
    setup = Setup(
        gpu=arguments.gpu, jobs=arguments.jobs, deadline_s=deadline, quick=arguments.slice
    )
    suites = (Suite.GATE, Suite.BASELINE) if arguments.baseline_suite else (Suite.GATE,)
    with closing(run_all((*faults, *controls), suites, setup)) as found:
        for one, outcomes in found:
            for suite, outcome in zip(suites, outcomes, strict=True):
                _progress(one, suite, outcome)
            yield one, outcomes


def _section(arguments: argparse.Namespace) -> str:
    return GPU_SECTION if arguments.gpu else SECTION


def _show(path: Path) -> ExitCode:
    record = read_faults(path, SECTION) or read_faults(path, GPU_SECTION)
    if record is None:
        # raises, and names what there is instead
        record = require_section(path, SECTION)
    say(render_markdown(record))
    if unfinished := record.get("unfinished"):
        which = f"{len(unfinished)} not planted yet: {', '.join(unfinished[:3])}"
        message = f"{path}: the run was interrupted, {which}"
        raise CommandError(message, ExitCode.INCOMPLETE)
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
