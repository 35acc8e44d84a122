"""One test for every attempt at every case of every subject; the YAML files say which."""

from __future__ import annotations

from loragate.matrix.selection import CaseRun
from loragate.plugin.judging import Judge


def test_case(case_run: CaseRun, judge: Judge) -> None:
    judge(case_run)
