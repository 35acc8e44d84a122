from __future__ import annotations

import pytest

from loragate.bench.kinds import KINDS
from loragate.core.checkout import project_root
from loragate.records.results import read_section

RECORD = "ci/results/nvidia-h200.json"


@pytest.mark.parametrize("name", KINDS)
def test_the_table_in_the_readme_is_the_recorded_run(name: str) -> None:
    kind = KINDS[name]
    begin, end = f"<!-- bench {name}: begin -->", f"<!-- bench {name}: end -->"
    section = read_section(project_root() / RECORD, kind.section)
    if section is None:
        pytest.skip(f"{RECORD} has no run of `bench {name}` yet")
    readme = (project_root() / "README.md").read_text(encoding="utf-8")
    assert begin in readme, f"README.md lacks {begin}"
    shown = readme.split(begin)[1].split(end)[0].strip()
    assert shown == kind.markdown(kind.read(section)), (
        f"put the output of `loragate bench show {RECORD} {name}` between the marks in README.md"
    )
