"""The judges, each a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loragate.oracles.base_rows import BaseRows
from loragate.oracles.canary import Canary
from loragate.oracles.compile import Compile
from loragate.oracles.exact import Exact
from loragate.oracles.guard import GuardedInput
from loragate.oracles.permute import Permute
from loragate.oracles.protocol import Oracle
from loragate.oracles.reference import Reference
from loragate.oracles.repeat import Repeat
from loragate.oracles.sequence import Sequence
from loragate.verdict import OracleName

_ALL: tuple[Oracle, ...] = (
    Reference(),
    Exact(),
    BaseRows(),
    Canary(),
    Repeat(),
    Permute(),
    Sequence(),
    GuardedInput(),
    Compile(),
)
ORACLES: Mapping[OracleName, Oracle] = MappingProxyType({oracle.name: oracle for oracle in _ALL})
