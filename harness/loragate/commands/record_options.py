"""The arguments that record what a command found, the same for every command. No torch."""

from __future__ import annotations

import argparse

from loragate.core.arguments import path_of
from loragate.records.recorder import Recorder


def add_record_options(parser: argparse.ArgumentParser, what: str) -> None:
    """`what` names in the help what is recorded, for instance "the figures"."""
    parser.add_argument("--record", type=path_of, metavar="FILE", help=f"write {what} to FILE")
    parser.add_argument(
        "--commit", help="what to record as the commit where the tree has no history"
    )


def add_events_options(parser: argparse.ArgumentParser) -> None:
    """For a command that is a leg of the gate: where it appends notes."""
    parser.add_argument(
        "--events", type=path_of, metavar="FILE", help="append a note to the events of a gate run"
    )
    parser.add_argument(
        "--run", dest="run_name", default="", metavar="NAME", help="the name of that run"
    )


def open_record(arguments: argparse.Namespace, section: str) -> Recorder | None:
    """The section of the file that --record names; None without --record. Raises ResultsError."""
    if arguments.record is None:
        return None
    return Recorder.open(arguments.record, section, commit=arguments.commit)
