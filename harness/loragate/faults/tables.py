"""What the corpus showed, for a terminal and as Markdown. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from loragate.core.verdict import OracleName, Verdict
from loragate.faults.model import Control, Fate, Group, Outcome, Part
from loragate.faults.record import Line, payload

_COLUMNS = {oracle.value: oracle.value[:3] for oracle in OracleName}
_OTHERS = "oth"
_HEADER = (
    "faults",
    "detected by the gate",
    "of these by a case",
    "only by own unit tests",
    "baseline suite",
)
_DETECTION_HEAD = (
    "| planted | count | detected by the gate | of these by a case | only by own unit tests "
    "| usual style |\n|---|--:|--:|--:|--:|--:|"
)
# fates that fail a run
BAD = (Fate.BROKEN, Fate.SURVIVED, Fate.MISSED)


def render_terminal(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> str:
    """What is wrong comes first, each with its replay command; then what detected which fault."""
    parts = [*_troubles(lines), *_broken_baselines(lines), *_false_alarms(controls)]
    parts += ["", *_matrix(lines)]
    if any(line.baseline for line in lines):
        parts += ["", *_rates(payload(lines, controls))]
    return "\n".join([*parts, "", _summary(lines, controls)])


def _troubles(lines: Iterable[Line]) -> list[str]:
    bad = sorted(
        (line for line in lines if line.outcome.fate in BAD),
        key=lambda line: list(Fate).index(line.outcome.fate),
    )
    texts: list[str] = []
    for line in bad:
        fault, outcome = line.fault, line.outcome
        texts.append(f"{outcome.fate.value.upper()} {fault.name} ({fault.source})")
        texts.append(f"    {fault.why}")
        texts.append(f"    {outcome.message}")
        texts.append(f"    again: loragate faults --only {fault.name}")
    return texts


def _broken_baselines(lines: Iterable[Line]) -> list[str]:
    texts: list[str] = []
    for line in lines:
        # a fault that cannot be planted at all is listed by _troubles
        if line.baseline and line.baseline.fate is Fate.BROKEN and line.outcome.fate not in BAD:
            texts.append(f"BROKEN BASELINE SUITE {line.fault.name} ({line.fault.source})")
            texts.append(f"    {line.baseline.message}")
            texts.append(f"    again: loragate faults --baseline-suite --only {line.fault.name}")
    return texts


def _false_alarms(controls: Iterable[tuple[Control, Outcome]]) -> list[str]:
    texts: list[str] = []
    for control, outcome in controls:
        if outcome.fate is not Fate.SURVIVED:
            word = "FALSE ALARM" if outcome.fate is Fate.KILLED else "BROKEN CONTROL"
            texts.append(f"{word} {control.name}: {control.why}")
            texts.append(f"    {outcome.message}")
            texts.append(f"    again: loragate faults --only {control.name}")
    return texts


def _matrix(lines: Sequence[Line]) -> list[str]:
    """X: required and detected; +: detected as well; -: required, not detected; .: passed."""
    width = max((len(line.fault.name) for line in lines), default=0)
    head = " ".join([*_COLUMNS.values(), _OTHERS])
    rows = [f"{'':<{width}}  {head}   s"]
    for line in sorted(lines, key=lambda line: list(Fate).index(line.outcome.fate)):
        marks = " ".join(f"{mark:^3}" for mark in _marks(line))
        others = ", ".join(name for name in line.outcome.killers if name not in _COLUMNS)
        seconds = f"{line.outcome.seconds:3.0f}" if line.outcome.seconds else "  -"
        fate = "" if line.outcome.fate is Fate.KILLED else line.outcome.fate.value
        rows.append(f"{line.fault.name:<{width}}  {marks} {seconds}  {fate or others}".rstrip())
    return rows


def _marks(line: Line) -> list[str]:
    wanted = {killer.name for killer in line.fault.killers}
    asked = {s.judge for s in line.outcome.sightings if s.verdict is not Verdict.SKIP}
    marks = []
    for name in _COLUMNS:
        if name in line.outcome.killers:
            marks.append("X" if name in wanted else "+")
        else:
            marks.append("-" if name in wanted else "." if name in asked else "")
    rest = set(line.outcome.killers) - _COLUMNS.keys()
    return [*marks, "X" if rest & wanted else "+" if rest else ""]


def _summary(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> str:
    counts = {fate: sum(line.outcome.fate is fate for line in lines) for fate in Fate}
    fates = [f"{counts[fate]} {fate.value}" for fate in reversed(Fate) if counts[fate]]
    passed = sum(outcome.fate is Fate.SURVIVED for _, outcome in controls)
    return f"{len(lines)} faults: {', '.join(fates)}; {passed} of {len(controls)} controls pass"


def render_markdown(record: Mapping[str, Any]) -> str:
    """Kill rates by group, next to those of the baseline suite where it was run."""
    faults: Mapping[str, Mapping[str, Any]] = record["faults"]
    head = f"| where the fault is | {' | '.join(_HEADER)} |\n|---|{'--:|' * len(_HEADER)}"
    rows = [
        _row(group.value, [f for f in faults.values() if f["group"] == group.value])
        for group in Group
    ]
    return "\n".join([head, *filter(None, rows), _row("**all**", list(faults.values()))])


def render_detection(record: Mapping[str, Any], on_gpu: Mapping[str, Any] | None = None) -> str:
    """A small table: linear layers, MoE layers, GPU only, all.

    on_gpu: the record of a GPU, for the faults that did not run without one."""
    gpu_only = [
        fault
        for name, fault in (on_gpu or {}).get("faults", {}).items()
        if name not in record["faults"] or _not_run(record["faults"][name])
    ]
    on_cpu = [fault for fault in record["faults"].values() if not _not_run(fault)]
    rows = [
        _detection_row(
            "faults in linear layers and adapters", [f for f in on_cpu if not _is_moe(f)]
        ),
        _detection_row("faults in MoE layers", [f for f in on_cpu if _is_moe(f)]),
        _detection_row("faults that show on a GPU only", gpu_only),
        _detection_row("**all faults**", [*on_cpu, *gpu_only]),
    ]
    return "\n".join([_DETECTION_HEAD, *filter(None, rows)])


def _not_run(fault: Mapping[str, Any]) -> bool:
    return bool(fault["fate"] == Fate.NOT_RUN.value)


def _is_moe(fault: Mapping[str, Any]) -> bool:
    return str(fault["group"]).startswith("MoE")


@dataclass(frozen=True, slots=True)
class _Counts:
    """`tried`: faults that can show on the machine of the record. `judged`: those that the
    baseline suite was run on; one that it could not run on is neither seen nor missed."""

    tried: int
    killed: int
    by_gate: int
    by_case: int
    judged: int
    by_baseline: int

    @classmethod
    def of(cls, faults: Sequence[Mapping[str, Any]]) -> Self:
        tried = [fault for fault in faults if not _not_run(fault)]
        killed = [fault for fault in tried if fault["fate"] == Fate.KILLED.value]
        unjudged = (None, Fate.BROKEN.value)
        judged = [fault for fault in tried if fault["baseline_suite"] not in unjudged]
        return cls(
            tried=len(tried),
            killed=len(killed),
            by_gate=sum(fault["detected_by_gate"] for fault in killed),
            by_case=sum(Part.CASE.value in fault["detected_by"] for fault in killed),
            judged=len(judged),
            by_baseline=sum(fault["baseline_suite"] == Fate.KILLED.value for fault in judged),
        )

    @property
    def baseline_rate(self) -> str:
        return f"{self.by_baseline} / {self.judged}" if self.judged else ""


def _row(title: str, faults: Sequence[Mapping[str, Any]]) -> str:
    n = _Counts.of(faults)
    if not n.tried:
        return ""
    apart = n.killed - n.by_gate
    rates = f"{n.by_gate} / {n.tried} | {n.by_case} | {apart} | {n.baseline_rate}"
    return f"| {title} | {n.tried} | {rates} |"


def _detection_row(title: str, faults: Sequence[Mapping[str, Any]]) -> str:
    n = _Counts.of(faults)
    if not n.tried:
        return ""
    baseline = n.baseline_rate or "not measured yet"
    apart = n.killed - n.by_gate
    return f"| {title} | {n.tried} | {n.by_gate} | {n.by_case} | {apart} | {baseline} |"


def _rates(record: Mapping[str, Any]) -> list[str]:
    rows = render_markdown(record).replace("**", "").splitlines()
    del rows[1]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in cells]
