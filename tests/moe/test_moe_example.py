from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_moe_adapters.py"


def test_the_moe_example_changes_the_rows_of_the_adapters_and_no_base_row() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("row")]
    assert [row[2] for row in rows] == ["base", "french", "french", "base", "german", "german"]
    assert all((float(row[-1]) < 1e-3) == (row[2] == "base") for row in rows)


def test_the_moe_example_reports_in_one_line_what_is_wrong_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    expected = f"{tmp_path / 'adapter_config.json'}: file not found; a PEFT adapter has one"
    assert ended.value.code == expected
