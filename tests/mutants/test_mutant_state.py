"""What results and maps are of: the state of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loragate.compile_leg import BASELINE
from loragate.core.checkout import project_root
from loragate.faults.planting import package_folder
from loragate.mutants import reach
from loragate.mutants.reach import load_reach, reach_of, save_reach, state_digest
from loragate.mutants.units import Kind, Unit

ROOT, HARNESS = project_root(), Path(reach.__file__).parents[1]
BLIND = next((HARNESS / "mutants/blind").glob("*.yaml"))


def digest_with_a_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if the file had one more byte."""
    assert path.is_file()
    read = Path.read_bytes

    def changed(self: Path) -> bytes:
        return read(self) + (b"x" if self.resolve() == path.resolve() else b"")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", changed)
        return state_digest()


@pytest.mark.parametrize(
    "path",
    [
        package_folder() / "dense/kernels.py",
        BASELINE,
        ROOT / "examples/serve_peft_folders.py",
        ROOT / "docs/lorakernels.md",
        ROOT / "conftest.py",
        ROOT / "tests/kernels/test_tp_partition.py",
        HARNESS / "mutants/units.py",
        HARNESS / "mutants/killing.py",
        HARNESS / "events/model.py",
        HARNESS / "faults/planting.py",
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_results_are_of_another_state_when_what_decides_them_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest_with_a_change(path, monkeypatch) != state_digest()


@pytest.mark.parametrize(
    "path",
    [BLIND, HARNESS / "mutants/equivalents.yaml", ROOT / "docs/mutants.md"],
    ids=lambda path: path.name,
)
def test_results_stay_when_only_the_list_of_mutants_or_their_page_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest_with_a_change(path, monkeypatch) == state_digest()


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_results_are_of_another_state_under_another_version_of_a_library(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = state_digest(), dict(reach.versions())
    monkeypatch.setattr(reach, "versions", lambda: found | {package: "0.1"})
    assert state_digest() != before


@pytest.mark.parametrize("damage", ["{}", "[]", "null", "{", "half", "lines", "digest alone"])
def test_a_map_that_cannot_be_read_is_measured_again(damage: str, tmp_path: Path) -> None:
    path, units = tmp_path / "reach.json", [Unit(Kind.TEST, "t.py::a")]
    save_reach(reach_of("now", units, [{"m.py": [1]}], {}, []), path)
    assert load_reach(path, "now") is not None
    text = path.read_text(encoding="utf-8")
    instead = {
        "half": text[: len(text) // 2],
        "lines": json.dumps(json.loads(text) | {"lines": {"m.py": 1}}),
        "digest alone": '{"digest": "now"}',
    }
    path.write_text(instead.get(damage, damage), encoding="utf-8")
    assert load_reach(path, "now") is None
