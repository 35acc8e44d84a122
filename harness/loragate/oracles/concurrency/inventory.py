"""A captured graph holds what every batch of its key needs, and nothing that only one batch has.

The same step is captured while different mappings are prepared: with adapters, with other adapters,
and with base rows only where the subject promises that such a graph serves every batch. Nothing is
replayed; the nodes are looked at.

* Each graph has all kernels that a step with adapters launches: a graph that was captured without
  them would serve the base model (vllm #43139).
* The graphs are the same, node by node: kernel, grid, buffers, and what each depends on.
* Whatever a node uses belongs to the graph, or is held by somebody after the next step has been
  prepared and an adapter was evicted and loaded again.
* Nodes that share bytes, one of them writing, have a path between them; all work is joined.
* No node copies between two buffers that both outlive the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.inventories import MAPPINGS, Captures, modelled_captures
from loragate.execution.streams.interpreted import NeverSatisfied
from loragate.execution.trace.inventory import (
    Finding,
    dangling,
    different,
    needless_copies,
    unjoined,
    unordered,
    wrong_kernels,
)
from loragate.matrix.case import Execution, Streams
from loragate.oracles.concurrency.race import never_satisfied
from loragate.oracles.evidence import passed
from loragate.protocol import Trial

_SHOWN = 3


class Inventory:
    name = OracleName.INVENTORY

    def applies(self, trial: Trial) -> str | None:
        if not trial.case.tokens:
            return "the batch has no rows"
        if trial.machine.device == "cpu" and trial.case.streams is not Streams.DUAL:
            return "without a GPU captures are modelled for cases of two streams only"
        if trial.machine.device != "cpu" and trial.case.execution is not Execution.GRAPH:
            return "the case captures no graph"
        return None

    def judge(self, trial: Trial) -> Judgement:
        try:
            captures = _captures(trial)
        except NeverSatisfied as error:
            return never_satisfied(self.name, str(error))
        if captures.graphs is None:
            message = "the host waits for the device within the step, which cannot be captured"
            return Judgement(self.name, Verdict.FAIL, Failure.HOST_WAIT, message)
        found = list(_findings(captures))
        if found:
            return _failure(found)
        first = captures.graphs[MAPPINGS[0]]
        return passed(
            self.name,
            graphs=float(len(captures.graphs)),
            nodes=float(len(first.nodes)),
            edges=float(len(first.edges)),
        )


def _captures(trial: Trial) -> Captures:
    if trial.machine.device == "cpu":
        return modelled_captures(trial)
    from loragate.execution.device_inventories import device_captures

    return device_captures(trial)


def _findings(captures: Captures) -> Iterator[tuple[str, Finding]]:
    """What is wrong, with the mapping that was prepared for the capture."""
    assert captures.graphs is not None
    first = captures.graphs[MAPPINGS[0]]
    for how, graph in captures.graphs.items():
        for check in (wrong_kernels(graph, captures.kernels), dangling(graph), unjoined(graph)):
            for finding in check:
                yield how, finding
        for finding in needless_copies(graph):
            yield how, finding
        for finding in different(first, graph, f"if captured {how}"):
            yield how, finding
    for how, recorded in captures.recorded.items():
        for finding in dangling(recorded):
            yield how, finding
        for finding in different(captures.recorded[MAPPINGS[0]], recorded, f"if captured {how}"):
            yield how, finding
    for finding in unordered(captures.ordered) if captures.ordered else ():
        yield MAPPINGS[0], finding


def _failure(found: list[tuple[str, Finding]]) -> Judgement:
    lines = [counted(len(found), "flaw of a captured graph", "flaws of captured graphs")]
    lines += [
        f"  {finding.flaw}, captured {how}: {finding.message}" for how, finding in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more")
    where: dict[str, int | str] = {"flaw": found[0][1].flaw, "captured": found[0][0]}
    metrics = {"flaws": float(len(found))}
    message = "\n".join(lines)
    return Judgement(
        OracleName.INVENTORY, Verdict.FAIL, Failure.WRONG_GRAPH, message, metrics, where
    )
