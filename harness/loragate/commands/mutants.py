"""`loragate mutants`: change lorakernels in small ways and count what the gate detects.

Exit codes: 0 every mutant that is no equivalent was killed, 1 one survived, 2 none of what was
asked for could be planted here, 3 something could not be run, 4 usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.verdict import ExitCode
from loragate.mutants.edits import Equivalents, read_edits, read_equivalents
from loragate.mutants.journal import Journal, kills_in
from loragate.mutants.model import Fate, Mutant, Result, Sources
from loragate.mutants.sources import read_sources

_FOLDER = Path(".loragate/mutants")
_JOBS = 2
_EQUIVALENTS = Path(__file__).resolve().parents[1] / "mutants" / "equivalents.yaml"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "mutants", help="change the kernels in small ways and count what the gate detects"
    )
    parser.add_argument("--edits", type=Path, metavar="FILE", required=True)
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help="default: 2")
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    from loragate.mutants.reach import state_digest

    sources = read_sources()
    with usage_errors():
        mutants = read_edits(arguments.edits, sources)
        folder = arguments.folder or project_root() / _FOLDER
        digest = state_digest()
        journal = Journal(folder / f"edits-{arguments.edits.stem}.jsonl", digest)
        results = journal.open()
    _plant(arguments, folder, digest, mutants, sources, journal, results)
    for mutant in mutants:
        result = results[mutant.id]
        print(f"{result.fate.value:<10} {mutant.id:<45} {result.judge} {result.killer}")
    survived = [m for m in mutants if results[m.id].fate is Fate.SURVIVED]
    print(f"{len(mutants)} mutants, {len(survived)} survived")
    return ExitCode.WRONG if survived else ExitCode.OK


def _plant(
    arguments: argparse.Namespace,
    folder: Path,
    digest: str,
    mutants: Sequence[Mutant],
    sources: Sources,
    journal: Journal,
    results: dict[str, Result],
) -> None:
    from loragate.core.child_process import ProcessPool
    from loragate.mutants.measuring import measure_reach
    from loragate.mutants.reach import load_reach, save_reach
    from loragate.mutants.runner import Setup, run_all

    reach = load_reach(folder / "reach.json", digest)
    if reach is None:
        print("measuring which cases and tests reach which line", file=sys.stderr, flush=True)
        processes = ProcessPool()
        try:
            reach = measure_reach(digest, processes, arguments.jobs)
        finally:
            processes.close()
        save_reach(reach, folder / "reach.json")
    known = folder / "host-tests.txt"
    known.write_text("\n".join(reach.host_tests), encoding="utf-8")
    setup = Setup(
        reach=reach,
        known=known,
        logs=folder,
        jobs=arguments.jobs,
        kills=list(kills_in(folder)),
    )
    waiting = [mutant for mutant in mutants if mutant.id not in results]
    begin = time.monotonic()
    with closing(run_all(waiting, sources, setup)) as found:
        for number, (mutant, result) in enumerate(found, 1):
            journal.add(mutant, result)
            results[mutant.id] = result
            each = (time.monotonic() - begin) / number
            left = each * (len(waiting) - number) / 60
            print(
                f"{number} of {len(waiting)}: {mutant.id}: {result.fate.value} "
                f"{result.judge} {result.killer} ({result.seconds:.0f} s, {left:.0f} min left)",
                file=sys.stderr,
                flush=True,
            )
