"""What an oracle is given."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol.boundary import CheckedSubject
from loragate.protocol.capabilities import Capabilities


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one case of one subject. Oracles draw data and open instances
    through the helpers in `loragate.inputs`, always from `seed`."""

    case: Case
    # a Subject given as it is gets its boundary here, so that no oracle can go around it
    subject: CheckedSubject
    capabilities: Capabilities
    machine: Machine
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.subject, CheckedSubject):
            object.__setattr__(self, "subject", CheckedSubject(self.subject))
