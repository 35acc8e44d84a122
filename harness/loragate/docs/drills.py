"""The table of drills, from the section that `./ci/drills --record-drills=FILE` records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.core.verdict import ExitCode

SECTION = "drills"

_BAR = "\\|"

_VERDICTS: Mapping[int, str] = {
    ExitCode.OK: "PASS",
    ExitCode.WRONG: "FAIL",
    ExitCode.INCOMPLETE: "INCONCLUSIVE",
    ExitCode.INFRASTRUCTURE: "INFRA",
    ExitCode.USAGE: "refused",
}


def drills_table(section: Mapping[str, Any]) -> str:
    """One row for each drill, by exit code; a drill that ended otherwise says so."""
    rows = sorted(section["drills"].values(), key=lambda row: (row["exit_code"], row["tried"]))
    lines = ["| what is tried | verdict | exit code | what is kept |", "| --- | --- | --: | --- |"]
    # a drill that is tried in several ways is one row
    lines += dict.fromkeys(map(_line, rows))
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    verdict, code = _VERDICTS.get(row["exit_code"], "none"), row["exit_code"]
    kept = row["kept"] if row["outcome"] == "passed" else f"**the drill {row['outcome']}**"
    cells = (row["tried"], verdict, str(code), kept)
    # a bar would end the cell
    return f"| {' | '.join(text.replace('|', _BAR) for text in cells)} |"
