"""The gate as a function. No torch: the gate runs in processes of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loragate.api.report import Report, read
from loragate.core.child_process import python_module
from loragate.core.verdict import ExitCode


class RunError(Exception):
    """The gate ended without a report. The message is what it said; `exit_code` is USAGE for wrong
    options, INFRASTRUCTURE for a machine that cannot run it."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `loragate gate`; what is not given is as it is there.

    subjects: names, or `module:object`.
    tier: "smoke", "premerge" or "nightly".
    cases: patterns for run ids.
    draws: how many draws of random data each case runs with; `repeats` of each.
    matrix: files of cases.
    shard: (i, n) for part i of n, from 1; `durations` is the report that balances the parts.
    speed: a revision or folder with another build of lorakernels, to compare its speed with.
    Raises TypeError for a single text where several belong.
    """

    subjects: tuple[str, ...] = ()
    tier: str | None = None
    cases: tuple[str, ...] = ()
    draws: int = 1
    repeats: int = 1
    matrix: tuple[str | Path, ...] = ()
    shard: tuple[int, int] | None = None
    durations: str | Path | None = None
    speed: str | None = None

    def __post_init__(self) -> None:
        for name in ("subjects", "cases", "matrix"):
            value = getattr(self, name)
            # whose letters would be taken for names, or for patterns of all cases
            if isinstance(value, str | Path):
                raise TypeError(f"{name}: must be a tuple, as in ({value!r},) (got {value!r})")

    def arguments(self) -> tuple[str, ...]:
        """As the command line takes them."""
        shard = None if self.shard is None else f"{self.shard[0]}/{self.shard[1]}"
        options: dict[str, Sequence[object]] = {
            "subject": self.subjects,
            "tier": _given(self.tier),
            "cases": self.cases,
            "seeds": () if self.draws == 1 else (self.draws,),
            "repeats": (self.repeats,),
            "matrix": self.matrix,
            "shard": _given(shard),
            "durations": _given(self.durations),
            "speed": _given(self.speed),
        }
        return tuple(f"--{name}={value}" for name, values in options.items() for value in values)


def run(folder: str | Path, options: Options | None = None, *, quiet: bool = False) -> Report:
    """Run the gate, write its report to `folder`, and judge it. An earlier report in the folder
    moves to `folder/previous`.

    quiet: print nothing; otherwise the progress goes to stdout.
    Raises RunError where there is no run that could be judged.
    """
    given = (options or Options()).arguments()
    earlier = _run_in(folder)
    done = subprocess.run(
        python_module("loragate", "gate", f"--report={folder}", *given),
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    message = done.stderr.strip()
    if done.returncode == ExitCode.USAGE:
        raise RunError(message, ExitCode.USAGE)
    if _run_in(folder) in ("", earlier):
        raise RunError(message, ExitCode.INFRASTRUCTURE)
    report = read(folder)
    if done.returncode != report.exit_code:
        # not all events could be written, for instance to a full disk
        raise RunError(message or f"exit code {done.returncode}", ExitCode.INFRASTRUCTURE)
    return report


def _run_in(folder: str | Path) -> str:
    """The name of the run whose report is in the folder, "" if there is none."""
    try:
        return read(folder).run
    except ValueError:
        return ""


def _given(value: object) -> tuple[object, ...]:
    return () if value is None else (value,)
