"""The judges, each a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loragate.oracles.exact import Exact
from loragate.oracles.protocol import Oracle
from loragate.oracles.reference import Reference
from loragate.verdict import OracleName

_ALL: tuple[Oracle, ...] = (
    Reference(),
    Exact(),
)
ORACLES: Mapping[OracleName, Oracle] = MappingProxyType({oracle.name: oracle for oracle in _ALL})
