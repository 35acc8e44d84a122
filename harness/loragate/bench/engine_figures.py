"""Results of `bench engine`: ratios, bars and the record, derived from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Self

from loragate.bench.bars import Bar, refuse_newer, worst_of
from loragate.bench.engine_rows import EngineRow, Serving, Work, engine_rows
from loragate.bench.graphs_rows import MODELS

SCHEMA = 1
# of what vLLM's kernels add to a step or a token
MAX_ADDED = MappingProxyType({"qwen3_8b": 0.6, "qwen3_30b_a3b": 0.5})
MAX_ANY_RATIO = 1.0
# of the model with experts; a bar has an upper limit: 1.15 times the tokens in 0.869 of the time
MIN_SERVE_SPEED, MAX_SERVE_TIME = 1.15, 0.869
# two engines without adapters differ by about as much
_LEAST_SHARE = 0.02
# a step of which the device works for less waits for the host, which hides what adapters add
_LEAST_DEVICE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """Calls of the plug-in's operators, by their names, that launched kernels for requests, or had
    them captured into a graph before; launches of vLLM's own kernels of adapters, likewise.
    vllms_of_layers: those of linear layers and experts among both, None where nobody counted them,
    as in records of before."""

    launched: Mapping[str, int]
    captured: Mapping[str, int]
    vllms_launched: int
    vllms_captured: int
    vllms_of_layers: int | None = None


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """An engine: seconds until it could be timed, and whose kernels ran."""

    model: str
    serving: Serving
    start_s: float
    counts: KernelCounts

    @property
    def problem(self) -> str | None:
        """Why its times are not those of what it is named after."""
        return next(self._problems(), None)

    def _problems(self) -> Iterator[str]:
        counts, where = self.counts, f"{self.model}, {self.serving}"
        if self.serving is not Serving.LORAKERNELS:
            ours = sum(counts.launched.values()) + sum(counts.captured.values())
            if ours:
                yield f"{where}: the plug-in ran {ours} times, and must not"
            for seen, how in (
                (counts.vllms_launched, "launched"),
                (counts.vllms_captured, "captured"),
            ):
                if (seen > 0) != (self.serving is Serving.VLLM):
                    yield f"{where}: vLLM's kernels of adapters were {how} {seen} times"
            return
        for operator in ("linear", "experts") if MODELS[self.model].experts else ("linear",):
            # prompts launch kernels, decode steps replay those of a capture
            if not counts.launched.get(operator) or not counts.captured.get(operator):
                yield (
                    f"{where}: of the plug-in's operator {operator!r}, "
                    f"{counts.launched.get(operator, 0)} calls launched kernels and "
                    f"{counts.captured.get(operator, 0)} were captured; it did not serve the engine"
                )
        if counts.vllms_of_layers:
            yield (
                f"{where}: vLLM's kernels of linear layers and experts ran or were captured "
                f"{counts.vllms_of_layers} times; the plug-in did not serve all layers"
            )


@dataclass(frozen=True, slots=True)
class EngineRowFigures:
    """Microseconds of a unit, and of the graph of a decode step on the device, by engine."""

    row: EngineRow
    us: Mapping[Serving, float]
    replay_us: Mapping[Serving, float]

    def added_us(self, serving: Serving) -> float:
        return self.us[serving] - self.us[Serving.BASE]

    @property
    def waits_for_host(self) -> bool:
        """Whether the device is idle for much of a decode step without adapters."""
        busy = self.replay_us.get(Serving.BASE)
        return busy is not None and busy < _LEAST_DEVICE_SHARE * self.us[Serving.BASE]

    @property
    def ratio(self) -> float | None:
        """Of what the plug-in adds to what vLLM's kernels add; where all of a request is timed, of
        the whole times. None where what is added is hidden, or lost in the noise."""
        if self.row.work is Work.SERVE:
            return self.us[Serving.LORAKERNELS] / self.us[Serving.VLLM]
        ours, theirs = self.added_us(Serving.LORAKERNELS), self.added_us(Serving.VLLM)
        if self.waits_for_host or theirs < _LEAST_SHARE * self.us[Serving.BASE]:
            return None
        return ours / theirs if ours > 0 else None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    candidate: str
    baseline: str
    rows: tuple[EngineRowFigures, ...]
    engines: tuple[ServedFigures, ...]

    @property
    def complete(self) -> bool:
        return [one.row for one in self.rows] == list(engine_rows())

    def bars(self) -> tuple[Bar, ...]:
        bars = [
            Bar(
                f"{model}: added to {unit} over {self.baseline}, worst",
                target,
                self._worst(model, work),
            )
            for model, target in MAX_ADDED.items()
            for work, unit in ((Work.DECODE, "a decode step"), (Work.PREFILL, "a prefill token"))
        ]
        experts = next(model for model, shape in MODELS.items() if shape.experts)
        bars.append(
            Bar(
                f"{experts}: time of mixed requests over {self.baseline}",
                MAX_SERVE_TIME,
                self._worst(experts, Work.SERVE),
                note=f"{MIN_SERVE_SPEED} times its throughput",
            )
        )
        worst = worst_of(one.ratio for one in self.rows)
        return (*bars, Bar(f"any row over {self.baseline}, worst", MAX_ANY_RATIO, worst))

    def payload(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "candidate": self.candidate,
            "baseline": self.baseline,
            "rows": [asdict(one) for one in self.rows],
            "engines": [asdict(one) for one in self.engines],
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError for a record of another form."""
        refuse_newer(payload["schema"], SCHEMA)
        return cls(
            candidate=str(payload["candidate"]),
            baseline=str(payload["baseline"]),
            rows=tuple(map(_row_of, payload["rows"])),
            engines=tuple(map(_served_of, payload["engines"])),
        )

    def _worst(self, model: str, work: Work) -> float | None:
        """None unless every row of the model and its work was measured."""
        wanted = [row for row in engine_rows() if (row.model, row.work) == (model, work)]
        ratios = {one.row: one.ratio for one in self.rows}
        return worst_of(ratios.get(row) for row in wanted)


def _row_of(one: Mapping[str, Any]) -> EngineRowFigures:
    row = EngineRow(**one["row"] | {"work": Work(one["row"]["work"])})
    return EngineRowFigures(row, _by_engine(one["us"]), _by_engine(one["replay_us"]))


def _by_engine(times: Mapping[str, float]) -> dict[Serving, float]:
    return {Serving(name): float(us) for name, us in times.items()}


def _served_of(one: Mapping[str, Any]) -> ServedFigures:
    return ServedFigures(
        model=str(one["model"]),
        serving=Serving(one["serving"]),
        start_s=float(one["start_s"]),
        counts=KernelCounts(**one["counts"]),
    )
