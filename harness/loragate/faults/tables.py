"""What the corpus showed, for a terminal, for a record and for a page. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loragate.core.verdict import OracleName, Verdict
from loragate.faults.model import Control, Fate, Fault, Group, Outcome

_COLUMNS = {oracle.value: oracle.value[:3] for oracle in OracleName}
_OTHERS = "oth"
# a fate that a fault may not have
BAD = (Fate.BROKEN, Fate.SURVIVED, Fate.MISSED)


@dataclass(frozen=True, slots=True)
class Line:
    """A fault and what became of it; `stand_in` if the stand-in looked for it, too."""

    fault: Fault
    outcome: Outcome
    stand_in: Outcome | None = None


def render_terminal(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> str:
    """Whatever is wrong comes first, with what replays it; then who noticed what."""
    parts = [*_troubles(lines), *_broken_stand_ins(lines), *_false_alarms(controls)]
    parts += ["", *_matrix(lines)]
    if any(line.stand_in for line in lines):
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


def _broken_stand_ins(lines: Iterable[Line]) -> list[str]:
    texts: list[str] = []
    for line in lines:
        # a fault that cannot be planted at all has been told already
        if line.stand_in and line.stand_in.fate is Fate.BROKEN and line.outcome.fate not in BAD:
            texts.append(f"BROKEN STAND-IN {line.fault.name} ({line.fault.source})")
            texts.append(f"    {line.stand_in.message}")
            texts.append(f"    again: loragate faults --stand-in --only {line.fault.name}")
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
    """X: had to notice and did; +: noticed, too; -: had to and did not; .: looked and passed."""
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
    wanted = {killer.value for killer in line.fault.killers}
    asked = {s.judge for s in line.outcome.sightings if s.verdict is not Verdict.SKIP}
    marks = []
    for name in _COLUMNS:
        noticed = name in line.outcome.killers
        if noticed:
            marks.append("X" if name in wanted else "+")
        else:
            marks.append("-" if name in wanted else "." if name in asked else "")
    rest = set(line.outcome.killers) - _COLUMNS.keys()
    return [*marks, "X" if rest & wanted else "+" if rest else ""]


def _summary(lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]]) -> str:
    counts = {fate: sum(line.outcome.fate is fate for line in lines) for fate in Fate}
    told = [f"{counts[fate]} {fate.value}" for fate in reversed(Fate) if counts[fate]]
    green = sum(outcome.fate is Fate.SURVIVED for _, outcome in controls)
    return f"{len(lines)} faults: {', '.join(told)}; {green} of {len(controls)} controls green"


def payload(
    lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]], *, commit: str = ""
) -> dict[str, Any]:
    """What a record keeps; `render_markdown` reads it back. `commit`: where it was seen."""
    return {
        "faults": {
            line.fault.name: {
                "group": line.fault.group.value,
                "source": line.fault.source,
                "needs": line.fault.needs.value,
                "digest": line.fault.digest,
                "commit": commit,
                "fate": line.outcome.fate.value,
                "killers": list(line.outcome.killers),
                "stand_in": line.stand_in.fate.value if line.stand_in else None,
                "stand_in_killers": list(line.stand_in.killers) if line.stand_in else [],
            }
            for line in lines
        },
        "controls": {
            control.name: {
                "digest": control.digest,
                "commit": commit,
                "fate": outcome.fate.value,
            }
            for control, outcome in controls
        },
    }


def render_markdown(record: Mapping[str, Any]) -> str:
    """Kill rates by group, loragate next to the stand-in where it was run."""
    faults: Mapping[str, Mapping[str, Any]] = record["faults"]
    head = "| where the fault is | faults | loragate | upstream style |\n|---|--:|--:|--:|"
    rows = [
        _markdown_row(group.value, [f for f in faults.values() if f["group"] == group.value])
        for group in Group
    ]
    total = _markdown_row("**all**", list(faults.values()))
    return "\n".join([head, *(row for row in rows if row), total])


def _markdown_row(title: str, faults: Sequence[Mapping[str, Any]]) -> str:
    tried = [fault for fault in faults if fault["fate"] != Fate.NOT_RUN.value]
    if not tried:
        return ""
    killed = sum(fault["fate"] == Fate.KILLED.value for fault in tried)
    # a stand-in that could not run has neither seen the fault nor missed it
    judged = [fault for fault in tried if fault["stand_in"] not in (None, Fate.BROKEN.value)]
    seen = sum(fault["stand_in"] == Fate.KILLED.value for fault in judged)
    other = f"{seen} / {len(judged)}" if judged else ""
    return f"| {title} | {len(tried)} | {killed} / {len(tried)} | {other} |"


def _rates(record: Mapping[str, Any]) -> list[str]:
    rows = render_markdown(record).replace("**", "").splitlines()
    del rows[1]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in cells]
