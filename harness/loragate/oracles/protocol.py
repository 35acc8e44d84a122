"""What an oracle gets to see, and what it must say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loragate.machine import Machine
from loragate.matrix.case import Case
from loragate.subjects.protocol import Capabilities, Subject
from loragate.verdict import Judgement, OracleName


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at one case with one subject. Oracles draw data and open instances
    through the helpers in `loragate.inputs`, always from `seed`."""

    case: Case
    subject: Subject
    capabilities: Capabilities
    machine: Machine
    seed: int


class Oracle(Protocol):
    name: OracleName

    def applies(self, trial: Trial) -> str | None:
        """None if it can judge this trial, else the reason why not."""

    def judge(self, trial: Trial) -> Judgement:
        """Run the subject as often as needed and judge. Raises nothing on a wrong subject."""
