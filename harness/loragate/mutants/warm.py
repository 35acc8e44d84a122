"""The warm servers of mutants, which run orders."""

from __future__ import annotations

from pathlib import Path

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure
from loragate.core.warm_server import WarmServer, environment_of_forks
from loragate.mutants.units import Order, to_json


def server_of_mutants(processes: ProcessPool, log: Path, *, gpu: bool = False) -> WarmServer:
    """Not started yet."""
    return WarmServer("loragate.mutants.server", processes, log, environment_of_forks(gpu=gpu))


def run_order(server: WarmServer, order: Order, patience_s: float) -> Failure | None:
    """How the process of the order failed, or None. It hangs if its transcript does not grow for
    `patience_s`. Raises ServerDied."""
    transcript = Path(order.transcript)
    return server.run(to_json(order), lambda: _size(transcript), patience_s)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
