"""docs/reliability.md shows the drills that the tests declare, as they were recorded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from loragate.core.checkout import project_root
from loragate.core.verdict import ExitCode
from loragate.docs.drills import SECTION, drills_table
from loragate.docs.pages import CPU_RECORD
from loragate.records.results import read_section


def declared() -> Iterator[tuple[str, dict[str, Any]]]:
    """File and function of each test with the marker, and what the marker says."""
    root = project_root()
    for path in sorted((root / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            ast.unparse(target): node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        for node in ast.walk(module):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.drill":
                    words = {word.arg: word.value for word in mark.keywords if word.arg}
                    facts = {name: _value(value, constants) for name, value in words.items()}
                    assert isinstance(node, ast.FunctionDef)
                    yield f"{path.relative_to(root)}::{node.name}", facts


def _value(node: ast.expr, constants: Mapping[str, ast.expr]) -> str | int:
    node = constants.get(ast.unparse(node), node)
    if isinstance(node, ast.Attribute):
        return int(ExitCode[node.attr])
    value = ast.literal_eval(node)
    assert isinstance(value, (str, int))
    return value


def recorded() -> dict[str, dict[str, Any]]:
    section = read_section(project_root() / CPU_RECORD, SECTION)
    assert section is not None
    return {name: dict(row) for name, row in section["drills"].items()}


def test_every_declared_drill_is_recorded_as_it_is_declared() -> None:
    shown = ("tried", "exit_code", "kept")
    # a test with several parameters is one drill
    found = {n.partition("[")[0]: {k: row[k] for k in shown} for n, row in recorded().items()}
    assert found == dict(declared()), "run ./ci/drills --record-drills=ci/results/cpu.json"


def test_every_recorded_drill_ended_as_declared() -> None:
    assert {name: row["outcome"] for name, row in recorded().items()} == dict.fromkeys(
        recorded(), "passed"
    )


def test_a_drill_that_ended_otherwise_is_shown_as_such() -> None:
    row = {"tried": "A", "exit_code": 3, "kept": "all", "outcome": "failed", "seconds": 1.0}
    assert "| A | INFRA | 3 | **the drill failed** |" in drills_table({"drills": {"a": row}})


def test_a_bar_in_a_drill_ends_no_cell() -> None:
    row = {"tried": "a | b", "exit_code": 0, "kept": "all", "outcome": "passed", "seconds": 1.0}
    assert "| a \\| b | PASS | 0 | all |" in drills_table({"drills": {"a": row}})
