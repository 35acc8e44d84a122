"""What a plain run of the gate executes for lorakernels, so that a fault can name nothing else.

Imports neither torch nor Triton: cases are expanded, host tests are found in their source files,
and launches are those on record for the compile leg.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loragate.compile_leg import BASELINE
from loragate.compile_leg.baseline import load_baseline
from loragate.core.checkout import project_root
from loragate.core.syntax import parse
from loragate.faults.model import GateItem, Part
from loragate.matrix.case import Case, Tier
from loragate.matrix.ids import case_id
from loragate.matrix.load import default_files, load_cases
from loragate.matrix.plan import tiers_within
from loragate.matrix.problems import nearest
from loragate.subjects.registry import SUBJECTS

SUBJECT = "lorakernels"


class UnknownItem(ValueError):
    """A fault names what the gate does not execute."""


@dataclass(frozen=True, slots=True)
class GateContents:
    """Cases by their ids, host tests without parameters, labels of launches."""

    tier: Tier
    cases: Mapping[str, Case]
    host_tests: frozenset[str]
    launches: frozenset[str]

    def check(self, items: Iterable[GateItem]) -> None:
        """Raises UnknownItem for the first item that the gate does not execute, with the nearest
        one that it does."""
        for item in items:
            known, name = self._known(item.part), item.id
            if item.part is Part.HOST_TEST:
                name = name.partition("[")[0]
            if name not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else ""
                tier = f" of tier {self.tier}" if item.part is Part.CASE else ""
                raise UnknownItem(f"the gate runs no {item.part}{tier} {item.id!r}{hint}")

    def _known(self, part: Part) -> Iterable[str]:
        known: Mapping[Part, Iterable[str]] = {
            Part.CASE: self.cases,
            Part.HOST_TEST: self.host_tests,
            Part.LAUNCH: self.launches,
        }
        return known[part]


@cache
def gate_contents(tier: Tier) -> GateContents:
    """What a plain run of `tier` executes. Raises CaseFileError and BaselineError."""
    within = tiers_within(tier)
    shipped = load_cases(default_files(project_root()))
    cases = {case_id(case): case for case in shipped if case.tier in within}
    # a second kernel of one launch is recorded as `label#2`
    labels = {label.partition("#")[0] for _, _, label in load_baseline(BASELINE).keys}
    return GateContents(tier, cases, frozenset(_host_tests()), frozenset(labels))


def _host_tests() -> Iterator[str]:
    """The functions that the host leg runs, as pytest names them."""
    root = project_root()
    for listed in SUBJECTS[SUBJECT].host_tests:
        path = root / listed
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        for file in files:
            yield from _tests_in(file, file.relative_to(root))


def _tests_in(file: Path, name: Path) -> Iterator[str]:
    for node in parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{name.as_posix()}::{node.name}"
