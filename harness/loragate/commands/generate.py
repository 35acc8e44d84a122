"""`loragate generate`: write case files whose sizes follow from a seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from loragate.core.arguments import count_from, path_of
from loragate.core.errors import CommandError
from loragate.core.files import read_regular, write_atomically
from loragate.core.machine import select_interpreter
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.matrix.case import OPERATIONS, Case, Site, Tier
from loragate.matrix.generated.cases import generate
from loragate.matrix.generated.text import file_text
from loragate.run.planning import refusal_of

_SITES = sorted(OPERATIONS)
# how the first line of a file begins
_MADE_BY = "made by `loragate generate"
_COUNT = 40


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("generate", help="write cases whose sizes follow from a seed")
    parser.add_argument(
        "--folder", type=path_of, required=True, metavar="FOLDER", help="one file a site is written"
    )
    parser.add_argument(
        "--seed", type=count_from(0), default=0, metavar="N", help="other cases (default: 0)"
    )
    parser.add_argument(
        "--count",
        type=count_from(1),
        default=_COUNT,
        metavar="N",
        help=f"cases of each site; more of them begin with fewer (default: {_COUNT})",
    )
    parser.add_argument(
        "--site",
        action="append",
        choices=[site.value for site in _SITES],
        help="only this one; repeatable (default: every operation)",
    )
    parser.add_argument(
        "--tier",
        choices=[tier.value for tier in Tier],
        default=Tier.PREMERGE.value,
        help="smoke: sizes for the interpreter (default: premerge)",
    )
    parser.add_argument(
        "--subject",
        metavar="NAME",
        help="only cases that this implementation runs here (default: of any)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    tier, subject = Tier(arguments.tier), arguments.subject
    fits = _fits(subject) if subject else None
    for site in map(Site, dict.fromkeys(arguments.site or _SITES)):
        cases = generate(site, arguments.seed, arguments.count, tier, fits)
        if not cases:
            say(f"no file for {site}: {subject} runs none of its cases")
            continue
        asked = f"--seed {arguments.seed} --count {arguments.count} --site {site} --tier {tier}"
        asked += f" --subject {subject}" if subject else ""
        path = arguments.folder / f"{site}.yaml"
        try:
            _refuse_others(path)
            arguments.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, file_text(site, cases, f"{_MADE_BY} {asked}`"))
        except OSError as error:
            text = f"{path}: cannot be written: {error.strerror}"
            raise CommandError(text, ExitCode.INFRASTRUCTURE) from error
        say(f"{path}: {len(cases)} cases")
    return ExitCode.OK


def _refuse_others(path: Path) -> None:
    """CommandError where a file would be lost that somebody has written by hand. OSError."""
    if path.exists() and not read_regular(path).startswith(f"# {_MADE_BY} ".encode()):
        text = f"{path}: was not made by this command, which would replace it; choose another"
        raise CommandError(f"{text} --folder", ExitCode.USAGE)


def _fits(subject: str) -> Callable[[Case], bool]:
    """Whether the subject runs a case here. CommandError where it runs none."""
    select_interpreter()
    # torch, which nothing else of this command needs
    from loragate.run.trial import load_subject

    try:
        _, have = load_subject(subject)
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    if isinstance(have, str):
        raise CommandError(f"{subject} does not run here: {have}", ExitCode.INFRASTRUCTURE)
    return lambda case: refusal_of(subject, have, case) is None
