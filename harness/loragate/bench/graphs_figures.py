"""Results of `bench graphs`: bars and the record, derived from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from loragate.bench.bars import Bar, refuse_newer, worst_of
from loragate.bench.graphs_rows import HOST_SLOTS, HostRow, MemoryRow, ReplayRow, graph_rows

SCHEMA = 1
MAX_REPLAY_RATIO = 1.05
MAX_HOST_US = 60.0
# what timing on a host repeats to
MAX_HOST_GROWTH = 1.10
MAX_MEMORY_GAP = 0.01


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """Microseconds of a replay, and the sum of the times of its kernels."""

    row: ReplayRow
    replay_us: float
    kernels_us: float

    @property
    def ratio(self) -> float:
        return self.replay_us / self.kernels_us


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Microseconds until a step has been queued, and those of them that the call took which
    launches the graph, medians over all rounds; `quietest_us`: beside the launch, in the round in
    which that took least. Earlier records lack the last or the last two."""

    row: HostRow
    host_us: float
    launch_us: float = 0.0
    quietest_us: float = 0.0

    @property
    def work_us(self) -> float:
        """What the host does between two launches."""
        return self.host_us - self.launch_us


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes that were said to be reserved, and that were found to be in use."""

    row: MemoryRow
    reserved: int
    used: int

    @property
    def gap(self) -> float:
        return abs(self.used - self.reserved) / self.reserved


GraphMeasured = ReplayFigures | HostFigures | MemoryFigures


@dataclass(frozen=True, slots=True)
class GraphFigures:
    candidate: str
    measured: tuple[GraphMeasured, ...]

    @property
    def replays(self) -> tuple[ReplayFigures, ...]:
        return tuple(one for one in self.measured if isinstance(one, ReplayFigures))

    @property
    def hosts(self) -> tuple[HostFigures, ...]:
        return tuple(one for one in self.measured if isinstance(one, HostFigures))

    @property
    def memories(self) -> tuple[MemoryFigures, ...]:
        return tuple(one for one in self.measured if isinstance(one, MemoryFigures))

    @property
    def complete(self) -> bool:
        return [one.row for one in self.measured] == list(graph_rows())

    def bars(self) -> tuple[Bar, ...]:
        return (
            Bar(
                "replay over the sum of its kernels, worst",
                MAX_REPLAY_RATIO,
                worst_of(one.ratio for one in self.replays),
            ),
            Bar("host work between two replays, us, worst", MAX_HOST_US, worst_of(self._work_us())),
            Bar(
                f"host work with {HOST_SLOTS[-1]} slots over that with {HOST_SLOTS[0]}, worst",
                MAX_HOST_GROWTH,
                worst_of(self._growth()),
            ),
            Bar(
                "memory in use against what was reserved, worst gap",
                MAX_MEMORY_GAP,
                worst_of(one.gap for one in self.memories),
            ),
        )

    def payload(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "candidate": self.candidate,
            "replays": [asdict(one) for one in self.replays],
            "hosts": [asdict(one) for one in self.hosts],
            "memories": [asdict(one) for one in self.memories],
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError for a record of another form."""
        refuse_newer(payload["schema"], SCHEMA)
        measured: list[GraphMeasured] = [
            ReplayFigures(**one | {"row": ReplayRow(**one["row"])}) for one in payload["replays"]
        ]
        measured += [
            HostFigures(**one | {"row": HostRow(**one["row"])}) for one in payload["hosts"]
        ]
        measured += [
            MemoryFigures(**one | {"row": MemoryRow(**one["row"])}) for one in payload["memories"]
        ]
        places = {row: place for place, row in enumerate(graph_rows())}
        # rows that another version had come last
        measured.sort(key=lambda one: places.get(one.row, len(places)))
        return cls(str(payload["candidate"]), tuple(measured))

    def _work_us(self) -> list[float]:
        return [one.work_us for one in self.hosts]

    def _growth(self) -> list[float | None]:
        """For each model; None where it was not measured with both numbers of slots."""
        us = {(one.row.model, one.row.slots): one.work_us for one in self.hosts}
        found: list[float | None] = []
        for model in dict.fromkeys(one.row.model for one in self.hosts):
            few, many = (us.get((model, slots)) for slots in HOST_SLOTS)
            found.append(None if few is None or many is None else many / few)
        return found
