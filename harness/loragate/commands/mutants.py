"""`loragate mutants`: change lorakernels in small ways and count what the gate detects.

Exit codes: 0 every mutant was killed, is equivalent or shows on a GPU only; 1 one survived; 2 there
was none to plant; 3 something could not be run; 4 usage.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from loragate.commands.record_options import add_record_options, open_record
from loragate.core.arguments import count_from, path_of
from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.files import check_writable
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.mutants.counts import Outcome
from loragate.mutants.edits import read_edits, read_equivalents
from loragate.mutants.model import Fate, Group, Mutant, Sources
from loragate.mutants.page import render_terminal
from loragate.mutants.record import (
    FIRST_SECTION,
    GPU_SECTION,
    SECTION,
    SURVIVORS,
    Run,
    left_by_samples,
    save_first,
    save_run,
)
from loragate.mutants.sources import diff_of, read_sources
from loragate.records.recorder import Recorder
from loragate.records.results import ResultsError, require_section

if TYPE_CHECKING:
    from loragate.mutants.session import Session

EQUIVALENTS = Path(__file__).resolve().parents[1] / "mutants" / "equivalents.yaml"
_FOLDER = Path(".loragate/mutants")
_JOBS = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "mutants", help="change the kernels in small ways and count what the gate detects"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--sample", type=count_from(1), metavar="N", help="N mutants, half of them subtle ones"
    )
    which.add_argument("--edits", type=path_of, metavar="FILE", help="the edits in a YAML file")
    which.add_argument(
        "--survivors",
        type=path_of,
        metavar="RECORD",
        help="what the samples in a record have left, planted once more",
    )
    parser.add_argument(
        "--seed", type=count_from(0), default=0, metavar="S", help="of the sample (default: 0)"
    )
    parser.add_argument(
        "--module", metavar="PATTERN", help="only modules whose path matches, as dense/* or *plan*"
    )
    parser.add_argument(
        "--operator",
        metavar="PATTERN",
        help="only operators whose name matches, as dropped-guard or Replace*, of a sample",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="run premerge cases on what a run without --gpu in the same folder has left",
    )
    parser.add_argument(
        "--jobs", type=count_from(1), default=_JOBS, metavar="N", help=f"default: {_JOBS}"
    )
    parser.add_argument(
        "--folder", type=path_of, metavar="DIR", help=f"of the results (default: {_FOLDER})"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and plant nothing")
    add_record_options(parser, "the results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    sources = read_sources()
    with usage_errors():
        if arguments.record and arguments.list:
            raise ValueError("--list plants nothing to record; leave out --record")
        for option in ("module", "operator"):
            if arguments.record and getattr(arguments, option):
                raise ValueError(f"--record takes whole samples; leave out --{option}")
        if arguments.operator and not arguments.sample:
            raise ValueError("--operator chooses from a sample; leave it out without --sample")
        equivalents = read_equivalents(EQUIVALENTS, sources)
        mutants, retired = chosen(arguments, sources)
        recorder = open_record(arguments, GPU_SECTION if arguments.gpu else SECTION)
        first = _first_record(arguments)
    if not mutants:
        raise CommandError("there is no mutant to plant", ExitCode.INCOMPLETE)
    if arguments.list:
        say("\n\n".join(_listed(m, equivalents.reason(m, sources), sources) for m in mutants))
        _print_retired(retired)
        return ExitCode.OK
    if arguments.gpu and not _has_gpu():
        raise CommandError("--gpu needs a GPU", ExitCode.INFRASTRUCTURE)
    _check_folder(folder_of(arguments))
    session = _session(arguments, sources)
    with usage_errors():
        outcomes = session.run(mutants, equivalents)
    say(render_terminal(outcomes, sources))
    _print_retired(retired)
    code = exit_code(outcomes)
    if code is ExitCode.INFRASTRUCTURE:
        raise CommandError("not every mutant could be run; the same command goes on", code)
    _save(recorder, first, session.name, Run(session.state, outcomes, retired))
    return code


def _listed(mutant: Mutant, equivalent: str | None, sources: Sources) -> str:
    reason = f" is equivalent: {equivalent}" if equivalent else ""
    return f"{mutant.id}{reason}\n{diff_of(mutant, sources)}"


def _session(arguments: argparse.Namespace, sources: Sources) -> Session:
    # these import pytest
    from loragate.mutants.reach import state_digest
    from loragate.mutants.session import Session

    return Session(
        folder=folder_of(arguments),
        name=name_of(arguments),
        state=state_digest(),
        sources=sources,
        jobs=arguments.jobs,
        gpu=arguments.gpu,
    )


def folder_of(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.folder or project_root() / _FOLDER
    return folder.resolve()


def _check_folder(folder: Path) -> None:
    """Before minutes are spent on what could not be written. Raises CommandError."""
    try:
        check_writable(folder / "results")
    except OSError as error:
        text = f"{folder}: cannot be written: {error.strerror}"
        raise CommandError(text, ExitCode.USAGE) from error


def chosen(
    arguments: argparse.Namespace, sources: Sources
) -> tuple[list[Mutant], Mapping[str, str]]:
    """The mutants that were asked for, and what of them is not planted, with reasons. Raises
    ValueError and ResultsError."""
    pattern = arguments.module or "*"
    wanted = {path: text for path, text in sources.items() if fnmatch.fnmatch(path, pattern)}
    if not wanted:
        raise ValueError(f"there is no module like {pattern!r}, for instance dense/kernels.py")
    if arguments.edits:
        edits = read_edits(arguments.edits, sources)
        return [m for m in edits.mutants if m.module in wanted], edits.retired
    if arguments.survivors:
        return _survivors(wanted, arguments.survivors)
    return _sample(wanted, arguments), {}


def _survivors(sources: Sources, record: Path) -> tuple[list[Mutant], Mapping[str, str]]:
    """Of modules of `sources`, what the samples of a record have left."""
    from loragate.mutants.generation.sampling import with_ids

    section = require_section(record, SECTION)
    try:
        left = left_by_samples(section["runs"])
    except (KeyError, TypeError, AttributeError) as error:
        text = f"{record}: section {SECTION!r} has no runs as this command records them: {error!r}"
        raise ResultsError(text) from error
    with _generators():
        found = with_ids(sources, left)
    names = {mutant.id for mutant in found}
    gone = (id for id in left if id not in names and id.partition(":")[0] in sources)
    return found, dict.fromkeys(gone, "its text is gone, or decides about speed alone")


def _sample(sources: Sources, arguments: argparse.Namespace) -> list[Mutant]:
    from loragate.mutants.generation.sampling import sample

    with _generators():
        found = sample(sources, arguments.sample, arguments.seed, arguments.operator or "*")
    if not found and arguments.operator:
        raise ValueError(f"there is no operator like {arguments.operator!r}, for instance edge")
    return found


@contextmanager
def _generators() -> Iterator[None]:
    """Within, mutants are generated. Raises CommandError where a package for it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"generated mutants need the package {error.name}: pip install loragate[test]"
        raise CommandError(text, ExitCode.INFRASTRUCTURE) from error


def name_of(arguments: argparse.Namespace) -> str:
    """Of the run, in its folder and in a record."""
    if arguments.edits:
        name = f"edits-{arguments.edits.stem}"
    elif arguments.survivors:
        name = SURVIVORS
    else:
        name = f"sample-{arguments.sample}-seed-{arguments.seed}"
    for option in ("module", "operator"):
        if pattern := getattr(arguments, option):
            letters = "".join(c if c.isalnum() else "_" for c in pattern)
            name += f"-{option}-{letters}"
    return name


def exit_code(outcomes: Sequence[Outcome]) -> ExitCode:
    fates = {result.fate for _, result in outcomes}
    if Fate.BROKEN in fates:
        return ExitCode.INFRASTRUCTURE
    return ExitCode.WRONG if Fate.SURVIVED in fates else ExitCode.OK


def _print_retired(retired: Mapping[str, str]) -> None:
    for name, reason in retired.items():
        say(f"\nRETIRED {name}, not planted: {reason}")


def _first_record(arguments: argparse.Namespace) -> Recorder | None:
    """For whole sets of edits alone: a sample can be drawn again with another seed."""
    if arguments.gpu or arguments.module or not arguments.edits:
        return None
    return open_record(arguments, FIRST_SECTION)


def _save(
    recorder: Recorder | None,
    first: Recorder | None,
    name: str,
    run: Run,
) -> None:
    if recorder is None:
        return
    save_run(recorder, name, run)
    say(f"recorded in {recorder.path}")
    if first is not None and save_first(first, name, run):
        say(f"these are the first results of {Group.BLIND.value} edits, and stay on record")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
