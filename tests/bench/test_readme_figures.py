from __future__ import annotations

import pytest

from loragate.bench.cli import SECTION
from loragate.bench.figures import DenseFigures
from loragate.bench.tables import render_markdown
from loragate.environment import project_root
from loragate.results import read_section

RECORD = "ci/results/nvidia-h200.json"
BEGIN, END = "<!-- bench dense: begin -->", "<!-- bench dense: end -->"


def test_the_table_in_the_readme_is_the_recorded_run() -> None:
    section = read_section(project_root() / RECORD, SECTION)
    if section is None:
        pytest.skip(f"{RECORD} has no run of `bench dense` yet")
    readme = (project_root() / "README.md").read_text(encoding="utf-8")
    assert BEGIN in readme, f"README.md lacks {BEGIN}"
    shown = readme.split(BEGIN)[1].split(END)[0].strip()
    assert shown == render_markdown(DenseFigures.from_payload(section)), (
        f"put the output of `loragate bench show {RECORD}` between the marks in README.md"
    )
