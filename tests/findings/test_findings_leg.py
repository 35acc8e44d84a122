from __future__ import annotations

from pathlib import Path

import pytest

from loragate.legs import make_legs
from loragate.matrix.case import Tier
from loragate.selection import Selection


@pytest.mark.parametrize(("subjects", "tried"), [(("vllm",), True), (("lorakernels",), False)])
def test_the_gate_tries_the_findings_of_a_subject_that_it_checks(
    subjects: tuple[str, ...], tried: bool
) -> None:
    selection = Selection(matrix=(), subjects=subjects, tier=Tier.SMOKE)
    legs = make_legs(selection, run="r", report=Path("report"), has_gpu=False)
    commands = {leg.name: leg.command[1:] for leg in legs}
    record = (f"--events={Path('report') / 'events.jsonl'}", "--run=r")
    command = ("-m", "loragate", "findings", *record)
    assert commands.get("findings") == (command if tried else None)
