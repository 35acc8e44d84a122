"""The protocol of an oracle."""

from __future__ import annotations

from typing import Protocol

from loragate.core.verdict import Judgement, OracleName
from loragate.protocol import Trial


class Oracle(Protocol):
    name: OracleName

    def applies(self, trial: Trial) -> str | None:
        """None if it can judge this trial, else the reason why not."""

    def judge(self, trial: Trial) -> Judgement:
        """Run the subject as often as needed and judge. Of what a wrong subject raises, it lets
        pass what it does not judge."""
