"""One test for every run of every case of every subject; the YAML files say which."""

from __future__ import annotations

from loragate.matrix.case_run import CaseRun
from loragate.plugin.judging import Judge


def test_case(case_run: CaseRun, judge: Judge) -> None:
    judge(case_run)
