from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.commands import findings as cli
from loragate.core.checkout import Tree
from loragate.core.verdict import ExitCode
from loragate.findings.ledger import Finding, Observation, Seen
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.records import recorder
from loragate.records.results import read_section
from loragate.run.legs import GateSetup, legs_of


@pytest.mark.parametrize(("subjects", "tried"), [(("vllm",), True), (("lorakernels",), False)])
def test_the_gate_tries_the_findings_of_a_subject_that_it_checks(
    subjects: tuple[str, ...], tried: bool
) -> None:
    selection = Selection(matrix=(), subjects=subjects, tier=Tier.SMOKE)
    setup = GateSetup(run="r", report=Path("report"), selection=selection, has_gpu=False)
    commands = {leg.name: leg.command[1:] for leg in legs_of(setup)}
    record = (f"--events={Path('report') / 'events.jsonl'}", "--run=r")
    command = ("-m", "loragate", "findings", *record)
    assert commands.get("findings") == (command if tried else None)


def test_a_record_names_the_code_as_it_was_before_the_first_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checkout = tmp_path / "gpu.json", ["as it began"]

    def try_probes(findings: Sequence[Finding]) -> tuple[str, dict[str, Observation]]:
        checkout[0] = "edited meanwhile"
        seen = Observation(Seen.REPRODUCED, "seen")
        return "0.26.0", {finding.probe: seen for finding in findings if finding.probe}

    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: (checkout[0], Tree.CLEAN))
    monkeypatch.setattr(cli, "_try_probes", try_probes)
    assert main(["findings", "--record", str(path)]) == ExitCode.OK
    section = read_section(path, cli.SECTION)
    assert section is not None
    assert (section["commit"], section["tree"]) == ("as it began", "clean")
    assert section["executed"] > 0
