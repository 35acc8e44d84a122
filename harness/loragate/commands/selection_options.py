"""The arguments that say which cases a command is about, the same for each command. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from loragate.core.checkout import project_root
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection

DEFAULT_SUBJECT = "lorakernels"


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--subject",
        action="append",
        metavar="NAME",
        help="implementation to check: lorakernels, torch, vllm or module:object; repeatable",
    )
    parser.add_argument(
        "--tier",
        choices=[tier.value for tier in Tier],
        help="default: premerge with a GPU, smoke without",
    )
    parser.add_argument(
        "--cases",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only run ids with this piece, or that match this shell pattern; repeatable",
    )
    attempts = parser.add_mutually_exclusive_group()
    attempts.add_argument(
        "--attempt", type=_count_from(0), metavar="N", help="draw the data of attempt N"
    )
    attempts.add_argument(
        "--seeds", type=_count_from(1), metavar="N", help="run attempts 0 to N-1, each its own data"
    )
    add_matrix_option(parser)


def add_matrix_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix",
        action="append",
        type=Path,
        metavar="FILE",
        help="YAML file of cases; repeatable (default: cases/*.yaml)",
    )


def selection_from(arguments: argparse.Namespace, *, has_gpu: bool) -> Selection:
    tier = Tier(arguments.tier or (Tier.PREMERGE if has_gpu else Tier.SMOKE))
    # the plain one costs little where shapes are small, and shows that the oracles are fair
    default = [DEFAULT_SUBJECT, "torch"] if tier is Tier.SMOKE else [DEFAULT_SUBJECT]
    return Selection(
        matrix=matrix_files(arguments),
        subjects=tuple(dict.fromkeys(arguments.subject or default)),
        tier=tier,
        attempts=tuple(range(arguments.seeds)) if arguments.seeds else (arguments.attempt or 0,),
        patterns=tuple(arguments.cases),
    )


def matrix_files(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if arguments.matrix:
        return tuple(path.absolute() for path in arguments.matrix)
    return tuple(sorted((project_root() / "cases").glob("*.yaml")))


def _count_from(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a number from {lowest} up (got {text!r})")
        return int(text)

    return parse
