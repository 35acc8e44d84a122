"""The oracles, one module each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loragate.core.verdict import OracleName
from loragate.oracles.concurrency.inventory import Inventory
from loragate.oracles.concurrency.overlap import Overlap
from loragate.oracles.concurrency.race import Race
from loragate.oracles.concurrency.schedule import Schedule
from loragate.oracles.contract.compile import Compile
from loragate.oracles.contract.guard import GuardedInput
from loragate.oracles.contract.hot_path import HotPath
from loragate.oracles.contract.work import Work
from loragate.oracles.engine.liveness import Liveness
from loragate.oracles.engine.properties import EngineProperties
from loragate.oracles.engine.tokens import Tokens
from loragate.oracles.memory.canary import Canary
from loragate.oracles.numeric.base_rows import BaseRows
from loragate.oracles.numeric.exact import Exact
from loragate.oracles.numeric.range import Range
from loragate.oracles.numeric.reference import Reference
from loragate.oracles.oracle import Oracle
from loragate.oracles.state.batch_invariance import BatchInvariance
from loragate.oracles.state.graph import Graph
from loragate.oracles.state.isolation import Isolation
from loragate.oracles.state.permute import Permute
from loragate.oracles.state.queue import Queue
from loragate.oracles.state.repeat import Repeat
from loragate.oracles.state.sequence import Sequence

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
    Isolation(),
    Range(),
    Work(),
    BatchInvariance(),
    Queue(),
    Graph(),
    Race(),
    Schedule(),
    Overlap(),
    HotPath(),
    Inventory(),
    Tokens(),
    EngineProperties(),
    Liveness(),
)
ORACLES: Mapping[OracleName, Oracle] = MappingProxyType({oracle.name: oracle for oracle in _ALL})
