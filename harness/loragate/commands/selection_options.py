"""The arguments that select cases, the same for every command that takes them. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from loragate.core.arguments import count_from, path_of
from loragate.core.checkout import data_root
from loragate.core.errors import usage_errors
from loragate.events.durations import durations_of
from loragate.matrix.case import Tier
from loragate.matrix.load import default_files, named_files
from loragate.matrix.selection import Selection
from loragate.matrix.shards import Shard, shard_numbers

DEFAULT_SUBJECT = "lorakernels"
# each is an argument of the leg that runs the cases, whose length the system limits
_MOST_SEEDS = 10_000


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser)
    draws = parser.add_mutually_exclusive_group()
    draws.add_argument(
        "--draw", type=count_from(0), metavar="N", help="use the random data of draw N (default: 0)"
    )
    draws.add_argument(
        "--seeds",
        type=count_from(1, _MOST_SEEDS),
        metavar="N",
        help="run draws 0 to N-1, each with other data",
    )
    parser.add_argument(
        "--repeats",
        type=count_from(1),
        default=1,
        metavar="N",
        help="run each draw N times (default: 1)",
    )
    add_shard_options(parser)
    add_matrix_option(parser)


def add_case_options(parser: argparse.ArgumentParser) -> None:
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
        help="only run cases whose id has these pieces, as in dense_delta.tokens-6, or matches "
        "this shell pattern; repeatable",
    )


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard",
        type=shard_numbers,
        metavar="I/N",
        help="only part I of N, the same on every machine; `loragate merge` joins their reports",
    )
    parser.add_argument(
        "--durations",
        type=path_of,
        metavar="REPORT",
        help="balance shards and workers by what an earlier report took; the same for all shards",
    )


def add_matrix_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix",
        action="append",
        type=path_of,
        metavar="PATH",
        help="YAML file of cases, or a folder of them; repeatable (default: cases/*.yaml)",
    )


def selection_from(arguments: argparse.Namespace, *, has_gpu: bool) -> Selection:
    tier = Tier(arguments.tier or (Tier.PREMERGE if has_gpu else Tier.SMOKE))
    # the torch subject costs little with small shapes, and shows that the oracles accept it
    default = [DEFAULT_SUBJECT, "torch"] if tier is Tier.SMOKE else [DEFAULT_SUBJECT]
    return Selection(
        matrix=matrix_files(arguments),
        subjects=tuple(dict.fromkeys(arguments.subject or default)),
        tier=tier,
        draws=tuple(range(arguments.seeds)) if arguments.seeds else (arguments.draw or 0,),
        repeats=arguments.repeats,
        patterns=tuple(arguments.cases),
        shard=shard_from(arguments),
    )


def shard_from(arguments: argparse.Namespace) -> Shard | None:
    """Raises CommandError."""
    with usage_errors():
        # also where there are no shards, and workers are balanced by them
        durations = durations_of(getattr(arguments, "durations", None))
        if arguments.shard is None:
            return None
        index, count = arguments.shard
        return Shard(index=index, count=count, durations=durations, of_gate=True)


def matrix_files(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if arguments.matrix:
        return named_files(path.absolute() for path in arguments.matrix)
    return default_files(data_root())
