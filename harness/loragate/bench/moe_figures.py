"""Results of `bench moe`: ratios, bars and the record, derived from raw medians. Pure.

Invariant: as in figures.py, everything that is printed or judged derives from the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Self

from loragate.bench.bars import REFERENCE_BYTES_PER_S, Bar, geometric_mean, refuse_newer, worst_of
from loragate.bench.moe_rows import (
    EXPERTS_TOKENS,
    FEW_EXPERTS,
    MANY_EXPERTS,
    REFERENCE_FLOPS,
    AlignRow,
    DeltaRow,
    ExpertsRow,
    LayerRow,
    moe_rows,
)
from loragate.matrix.case import Path

# 2: times with a cold cache; 3: alignments for few and for many experts
SCHEMA = 3

MAX_MEAN_RATIO = 0.35
MAX_ROW_RATIO = 1.0
MAX_OVER_FLOOR = 1.5
AIMED_OVER_FLOOR = 1.2
FLOOR_TOKENS = 64
MAX_ALIGN_RATIO = 0.1
ALIGN_TOKENS = 8192
MAX_EXPERTS_RATIO = 1.2
# by the tokens of a step
MAX_ADDED = MappingProxyType({2048: 0.22, 8192: 0.15})


class State(Enum):
    """What a call finds: pairs that were aligned before, or pairs to align; the latter also with
    none of the operands in the L2 cache."""

    READY = auto()
    ALIGNED = auto()
    COLD = auto()


@dataclass(frozen=True, slots=True)
class PathTimes:
    """Of one subject on one row, by path, medians in microseconds a call: on pairs that were
    aligned before; with alignment in each call; and so with none of the operands in the L2 cache,
    None where that was not measured. `error` is the largest rms error of a path over that of a
    plain computation in the same dtype."""

    launch_us: Mapping[str, float]
    aligned_us: Mapping[str, float]
    error: float
    cold_us: Mapping[str, float] | None = None

    def of(self, state: State) -> Mapping[str, float]:
        """Nothing where the state was not measured."""
        return {
            State.READY: self.launch_us,
            State.ALIGNED: self.aligned_us,
            State.COLD: self.cold_us or {},
        }[state]


@dataclass(frozen=True, slots=True)
class DeltaFigures:
    """`buckets`: combinations of slot and expert that had rows; `chosen`: the path of the plan."""

    row: DeltaRow
    buckets: int
    chosen: Path
    subjects: Mapping[str, PathTimes]

    @property
    def has_cold(self) -> bool:
        return any(times.cold_us for times in self.subjects.values())

    def ours_us(self, candidate: str, state: State = State.READY) -> float:
        """The time of the path that the plan chose."""
        return self.subjects[candidate].of(state)[Path.PLAN]

    def best_us(self, subject: str | None, state: State = State.READY) -> float | None:
        """The fastest path of a baseline; None where nothing of it was measured."""
        if subject is None or subject not in self.subjects:
            return None
        return min(self.subjects[subject].of(state).values(), default=None)

    def ratio(
        self, candidate: str, baseline: str | None, state: State = State.READY
    ) -> float | None:
        """None without a baseline, and where the noise is larger than what was timed."""
        theirs = self.best_us(baseline, state)
        if theirs is None:
            return None
        ours = self.ours_us(candidate, state)
        return ours / theirs if ours > 0 and theirs > 0 else None

    @property
    def floor_us(self) -> float:
        return self.row.floor_us(self.buckets)

    def over_floor(self, candidate: str) -> float:
        return self.ours_us(candidate) / self.floor_us


@dataclass(frozen=True, slots=True)
class AlignFigures:
    """Sorting the token-expert pairs of a step, by subject, medians in microseconds."""

    row: AlignRow
    us: Mapping[str, float]

    def ratio(self, candidate: str, baseline: str | None) -> float | None:
        theirs = self.us.get(baseline) if baseline else None
        return self.us[candidate] / theirs if theirs else None


@dataclass(frozen=True, slots=True)
class ExpertsFigures:
    """Medians of an alignment with few and with many experts, by subject."""

    row: ExpertsRow
    few_us: Mapping[str, float]
    many_us: Mapping[str, float]

    def ratio(self, subject: str) -> float:
        return self.many_us[subject] / self.few_us[subject]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """A whole layer, alignment included, medians in microseconds: the candidate without and
    with adapters; `baseline_us` is the baseline without them, None where its layer cannot be
    called alone."""

    row: LayerRow
    base_us: float
    lora_us: float
    baseline_us: float | None
    errors: Mapping[str, float]

    @property
    def added(self) -> float:
        """What LoRA adds, as a fraction of the layer without it."""
        return self.lora_us / self.base_us - 1


MoEMeasured = DeltaFigures | AlignFigures | ExpertsFigures | LayerFigures


@dataclass(frozen=True, slots=True)
class MoEFigures:
    """`baseline` is None where there was nothing to compare with."""

    candidate: str
    baseline: str | None
    copy_bytes_per_s: float
    measured: tuple[MoEMeasured, ...]

    @property
    def deltas(self) -> tuple[DeltaFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, DeltaFigures))

    @property
    def aligns(self) -> tuple[AlignFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, AlignFigures))

    @property
    def experts(self) -> tuple[ExpertsFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, ExpertsFigures))

    @property
    def layers(self) -> tuple[LayerFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, LayerFigures))

    @property
    def complete(self) -> bool:
        return tuple(figures.row for figures in self.measured) == moe_rows()

    def ratios(self, state: State = State.READY) -> tuple[float | None, ...]:
        """Of the rows that were measured in that state."""
        rows = [f for f in self.deltas if state is not State.COLD or f.has_cold]
        return tuple(f.ratio(self.candidate, self.baseline, state) for f in rows)

    def _added(self, tokens: int) -> float | None:
        return worst_of([f.added for f in self.layers if f.row.tokens == tokens])

    def bars(self) -> tuple[Bar, ...]:
        ratios, against = self.ratios(), self.baseline or "a baseline"
        large = [f for f in self.deltas if f.row.tokens >= FLOOR_TOKENS]
        over_floor = [f.over_floor(self.candidate) for f in large]
        aligns = [f for f in self.aligns if f.row.tokens == ALIGN_TOKENS]
        align_ratios = [f.ratio(self.candidate, self.baseline) for f in aligns]
        delta = f"moe_delta over the best path of {against}"
        cold = self.ratios(State.COLD)
        name = f"{delta}, aligned, cold L2, worst row"
        return (
            Bar(f"{delta}, geometric mean", MAX_MEAN_RATIO, geometric_mean(ratios)),
            Bar(f"{delta}, worst row", MAX_ROW_RATIO, worst_of(ratios)),
            *([Bar(name, MAX_ROW_RATIO, worst_of(cold))] if cold else []),
            Bar(
                f"moe_delta over the floor at M >= {FLOOR_TOKENS}, worst row",
                MAX_OVER_FLOOR,
                worst_of(over_floor),
                note=f"aim {AIMED_OVER_FLOOR}",
            ),
            Bar(
                f"align over that of {against} at M={ALIGN_TOKENS}",
                MAX_ALIGN_RATIO,
                worst_of(align_ratios),
            ),
            self._experts_bar(),
            *(
                Bar(f"added to a layer at M={tokens} by LoRA", most, self._added(tokens))
                for tokens, most in MAX_ADDED.items()
            ),
        )

    def _experts_bar(self) -> Bar:
        sizes = f"{min(EXPERTS_TOKENS)} to {max(EXPERTS_TOKENS)} tokens"
        name = f"align with {MANY_EXPERTS} experts over that with {FEW_EXPERTS} at {sizes}, worst"
        worst = worst_of([figures.ratio(self.candidate) for figures in self.experts])
        return Bar(name, MAX_EXPERTS_RATIO, worst)

    def payload(self) -> dict[str, Any]:
        """JSON record of this run; `from_payload` reads it."""
        return {
            "schema": SCHEMA,
            "candidate": self.candidate,
            "baseline": self.baseline,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "reference_bytes_per_s": REFERENCE_BYTES_PER_S,
            "reference_flops": REFERENCE_FLOPS,
            "expected": len(moe_rows()),
            "executed": len(self.measured),
            "deltas": [self._delta_payload(figures) for figures in self.deltas],
            "aligns": [asdict(figures) for figures in self.aligns],
            "experts": [asdict(figures) for figures in self.experts],
            "layers": [asdict(figures) | {"added": figures.added} for figures in self.layers],
            "bars": [asdict(bar) | {"verdict": bar.verdict.value} for bar in self.bars()],
        }

    def _delta_payload(self, figures: DeltaFigures) -> dict[str, Any]:
        return asdict(figures) | {
            # for readers of the file; `from_payload` derives these again
            "floor_us": figures.floor_us,
            "floor_at_measured_copy_us": figures.row.floor_us(
                figures.buckets, self.copy_bytes_per_s
            ),
            "over_floor": figures.over_floor(self.candidate),
            "ratio": figures.ratio(self.candidate, self.baseline),
            "aligned_ratio": figures.ratio(self.candidate, self.baseline, State.ALIGNED),
            "cold_ratio": figures.ratio(self.candidate, self.baseline, State.COLD)
            if figures.has_cold
            else None,
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError for a record of a newer schema."""
        refuse_newer(payload["schema"], SCHEMA)
        measured: list[MoEMeasured] = [_read_delta(delta) for delta in payload["deltas"]]
        for align in payload["aligns"]:
            measured.append(AlignFigures(AlignRow(**align["row"]), align["us"]))
        # none before schema 3
        for one in payload.get("experts", ()):
            measured.append(ExpertsFigures(ExpertsRow(**one["row"]), one["few_us"], one["many_us"]))
        for layer in payload["layers"]:
            raw = {key: value for key, value in layer.items() if key not in ("row", "added")}
            measured.append(LayerFigures(LayerRow(**layer["row"]), **raw))
        return cls(
            payload["candidate"],
            payload["baseline"],
            payload["copy_bytes_per_s"],
            tuple(measured),
        )


def _read_delta(delta: Mapping[str, Any]) -> DeltaFigures:
    return DeltaFigures(
        DeltaRow(**delta["row"]),
        delta["buckets"],
        Path(delta["chosen"]),
        {name: PathTimes(**times) for name, times in delta["subjects"].items()},
    )
