"""Run the gate, and say what became worse than in the report that was accepted last.

    python examples/gate_and_compare.py --subject mine.lora:MySubject
    python examples/gate_and_compare.py --tier nightly --folder /data/gate

A run that passes becomes the accepted report. The exit code is 1 if a case is worse than in that
report, otherwise that of the gate. Start from this file for a bot of your own: what it prints may
as well be a message to a chat or rows of a database.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from loragate import api


def main() -> int:
    arguments = _arguments()
    new, accepted, before = (arguments.folder / name for name in ("new", "accepted", "before"))
    if before.exists() and not accepted.exists():
        # an earlier run was killed while it accepted a report
        before.rename(accepted)
    options = api.Options(
        subjects=tuple(arguments.subject),
        tier=arguments.tier,
        matrix=tuple(arguments.matrix),
    )
    try:
        report = api.run(new, options, quiet=True)
    except api.RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(report.results)} cases at {report.commit[:12] or 'an unknown commit'}")
    if accepted.is_dir() and show(api.compare(api.read(accepted), report)):
        return api.ExitCode.WRONG
    print(*report.reasons, sep="\n")
    if report.exit_code is api.ExitCode.OK:
        accept(new, accepted, before)
    return report.exit_code


def accept(new: Path, accepted: Path, before: Path) -> None:
    """Put a report into the place of the accepted one, which is kept until that is done."""
    copy = accepted.with_name("copy")
    for left_over in (copy, before):
        shutil.rmtree(left_over, ignore_errors=True)
    # earlier reports in `previous` stay where they are
    shutil.copytree(new, copy, ignore=shutil.ignore_patterns("previous", ".lock"))
    if accepted.exists():
        accepted.rename(before)
    copy.rename(accepted)
    shutil.rmtree(before, ignore_errors=True)


def show(difference: api.Difference) -> bool:
    """Print what is different; whether anything is worse."""
    for name, (before, now) in difference.environment.items():
        print(f"{name}: {before or 'none'} -> {now or 'none'}")
    for change in difference.better:
        print(f"better: {change.now.run_id}: {change.before.verdict} -> {change.now.verdict}")
    for change in difference.worse:
        print(f"worse: {change.now.run_id}: {change.before.verdict} -> {change.now.verdict}")
        print(f"  {change.now.message}\n  {change.now.replay}")
    return bool(difference.worse)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--subject", action="append", default=[])
    parser.add_argument("--tier")
    parser.add_argument("--matrix", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=Path("gate"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
