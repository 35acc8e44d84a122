"""What an oracle is given."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol.capabilities import Capabilities
from loragate.protocol.subject import Subject


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one case of one subject. Oracles draw data and open instances
    through the helpers in `loragate.inputs`, always from `seed`."""

    case: Case
    subject: Subject
    capabilities: Capabilities
    machine: Machine
    seed: int
