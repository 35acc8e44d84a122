"""No two streams touch the same memory without an order between them.

Four steps in the same memory are recorded, with loads of adapters between the last ones: what each
operator and each kernel reads and writes, in bytes, and what events, waits, syncs and the allocator
impose. Replays of a CUDA graph are recorded as well, each launch as one operation of its stream:
those of a case of graphs, and on modelled streams three replays behind the steps, with a load and
the next mapping ahead of each. Of a step
that no device could capture, because the host waits within, `replays` among the measurements is 0.
Every pair of operations that share a byte, one of them writing it, needs an order, also where the
result happens to be right. Memory that is freed counts as written by the stream that it was
allocated on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.streams.interpreted import NeverSatisfied
from loragate.execution.streams.traced import traced_steps
from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.conflicts import Conflict, Hazard, conflicts, explained
from loragate.execution.trace.operations import Launch, Trace
from loragate.matrix.case import Streams
from loragate.oracles.evidence import passed
from loragate.protocol import Trial

_SHOWN = 3


class Race:
    name = OracleName.RACE

    def applies(self, trial: Trial) -> str | None:
        return needs_streams(trial)

    def judge(self, trial: Trial) -> Judgement:
        try:
            recorder = traced_steps(trial, as_server=True).recorder
            trace = recorder.trace()
        except NeverSatisfied as error:
            return never_satisfied(self.name, str(error))
        found = conflicts(trace)
        if found:
            return _failure(trace, found)
        if recorder.unknown:
            return _unknown(recorder.unknown)
        launches = sum(isinstance(op, Launch) for op in trace.operations)
        return passed(
            self.name,
            launches=float(launches),
            streams=float(len(trace.stream_names)),
            replays=float(recorder.graphs.launches),
        )


def needs_streams(trial: Trial) -> str | None:
    """The reason why streams cannot be judged, or None."""
    if trial.case.streams is not Streams.DUAL:
        return "the case runs on one stream"
    return None if trial.case.tokens else "the batch has no rows"


def never_satisfied(oracle: OracleName, message: str) -> Judgement:
    return Judgement(oracle, Verdict.FAIL, Failure.DEADLOCK, message)


def _unknown(arguments: Mapping[str, set[str]]) -> Judgement:
    listed = "; ".join(
        f"{kernel}: {', '.join(sorted(names))}" for kernel, names in sorted(arguments.items())
    )
    message = (
        "cannot be judged: kernels access memory by addresses that these arguments hold, and "
        f"Capabilities.pointer_tables does not declare all tensors behind them ({listed})"
    )
    return Judgement(OracleName.RACE, Verdict.INCONCLUSIVE, message=message)


def _failure(trace: Trace, found: list[Conflict]) -> Judgement:
    kinds = Counter(conflict.hazard for conflict in found)
    listed = ", ".join(f"{number} {hazard}" for hazard, number in kinds.items())
    lines = [f"{counted(len(found), 'unordered pair', 'unordered pairs')}: {listed}"]
    lines += [explained(trace, conflict) for conflict in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"and {len(found) - _SHOWN} more")
    idle = len(Clocks(trace).idle_waits)
    if idle:
        lines.append(f"{counted(idle, 'wait')} for an event that had not been recorded")
    first = found[0]
    where: dict[str, int | str] = {
        "hazard": first.hazard,
        "tensor": trace.block_name(first.block),
        "byte": first.span[0],
    }
    metrics = {hazard.name.lower(): float(kinds[hazard]) for hazard in Hazard}
    metrics |= {"pairs": float(len(found)), "idle_waits": float(idle)}
    return Judgement(OracleName.RACE, Verdict.FAIL, Failure.RACE, "\n".join(lines), metrics, where)
