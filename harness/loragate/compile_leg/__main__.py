"""`python -m loragate.compile_leg`: run the leg on its own, or `--update` its baseline."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from loragate.compile_leg.baseline import BaselineError
from loragate.compile_leg.dry_launch import ProviderError
from loragate.compile_leg.leg import ARCHS, BASELINE, SettingsError, describe, record, run
from loragate.compile_leg.releases import record_under
from loragate.core.arguments import Parser, path_of
from loragate.core.errors import exit_code_of
from loragate.core.files import check_writable
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.model import CompileResult, Event, Note

_EXIT_CODES = {
    Verdict.PASS: ExitCode.OK,
    Verdict.FAIL: ExitCode.WRONG,
    Verdict.INFRA: ExitCode.INFRASTRUCTURE,
}


class _Printer:
    """Prints results instead of appending them to the events of a run."""

    def __init__(self) -> None:
        self.results = 0

    def write(self, event: Event) -> None:
        if isinstance(event, CompileResult):
            self.results += 1
            for line in describe([event]):
                print(line)
        elif isinstance(event, Note):
            print(event.text)


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.release and not options.update:
        parser.error("--release needs --update")
    if options.update and options.arch:
        parser.error("--update always records the kernels for every GPU")
    if options.update:
        return _update_all(options.release, options.baseline, everything=options.all)
    printer = _Printer()
    archs = options.arch or ARCHS
    verdict = run(printer, archs=archs, baseline=options.baseline, everything=options.all)
    print(f"{printer.results} kernels for {', '.join(f'sm_{arch}' for arch in archs)}: {verdict}")
    return _EXIT_CODES.get(verdict, ExitCode.INCOMPLETE)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m loragate.compile_leg",
        description="Compile every kernel without a GPU and judge its resources.",
    )
    parser.add_argument("--update", action="store_true", help="record what Triton compiles now")
    parser.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="X.Y.Z",
        help="with --update: record under this release of Triton, installed apart; repeatable",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="compile also what is unchanged since the baseline, as the nightly tier does; "
        "with --update: record all of it anew",
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        type=int,
        choices=ARCHS,
        help="only this compute capability; repeatable",
    )
    parser.add_argument("--baseline", type=path_of, default=BASELINE)
    return parser


def _update_all(releases: list[str], baseline: Path, *, everything: bool) -> int:
    try:
        # before minutes of compiling
        check_writable(baseline)
    except OSError as error:
        print(f"{baseline}: cannot be written: {error.strerror}", file=sys.stderr)
        return ExitCode.INFRASTRUCTURE
    if releases:
        return _update_releases(releases, baseline, everything=everything)
    return _update(baseline, everything=everything)


def _update(baseline: Path, *, everything: bool) -> int:
    try:
        results = record(baseline=baseline, everything=everything)
    except (BaselineError, ProviderError) as error:
        print(error, file=sys.stderr)
        return ExitCode.INFRASTRUCTURE
    except SettingsError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitCode.WRONG
    new = [result for result in results if result.baseline is None]
    gone = [result for result in results if result.resources is None]
    for line in describe([result for result in results if result.verdict is Verdict.FAIL]):
        print(f"was {line}")
    recorded, compiled = len(results) - len(gone), sum(result.compiled for result in results)
    print(
        f"recorded {recorded} kernels, {compiled} compiled, {len(new)} new, {len(gone)} dropped, "
        f"in {baseline}"
    )
    return ExitCode.OK


def _update_releases(releases: list[str], baseline: Path, *, everything: bool) -> int:
    for release in releases:
        try:
            record_under(release, baseline, everything=everything)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"Triton {release} is not recorded: {error}", file=sys.stderr)
            return ExitCode.INFRASTRUCTURE
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
