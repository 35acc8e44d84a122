"""What a record keeps of a run of the corpus, and how records of older versions are read.

Pure but for reading the file; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.core.verdict import Verdict
from loragate.faults.model import Control, Fault, Outcome, Part
from loragate.records.results import ResultsError, read_section

# sections of a results file: recorded without a GPU, and on one
SECTION, GPU_SECTION = "faults", "faults_gpu"

# what the baseline suite said of a fault
BASELINE_KEYS = ("baseline_suite", "baseline_suite_killers")
# key by its name in records that were written before
_RENAMED = dict(zip(BASELINE_KEYS, ("stand_in", "stand_in_killers"), strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """A fault and its fate; `baseline` is its fate in the baseline suite, if that was run."""

    fault: Fault
    outcome: Outcome
    baseline: Outcome | None = None


def read_faults(path: Path, section: str) -> dict[str, Any] | None:
    """A recorded section with the keys of today, None if there is none. Raises ResultsError."""
    recorded = read_section(path, section)
    return None if recorded is None else upgraded(recorded)


def upgraded(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the keys and group labels of today. Raises ResultsError for one that does not
    say what the gate has detected: it is older than that question."""
    faults = record.get("faults", {})
    if not isinstance(faults, dict) or not all(isinstance(f, dict) for f in faults.values()):
        raise ResultsError("the record of the faults must have an object for each of them")
    old = next((name for name, entry in faults.items() if "detected_by_gate" not in entry), None)
    if old is not None:
        raise ResultsError(
            f"the record of the faults does not say whether the gate has detected {old}: an "
            "earlier version wrote it; record the whole corpus again"
        )
    return {**record, "faults": {name: _upgraded_entry(entry) for name, entry in faults.items()}}


def _upgraded_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(entry)
    for name, earlier in _RENAMED.items():
        if earlier in result:
            result[name] = result.pop(earlier)
    if "group" in result:
        result["group"] = result["group"].replace("experts: ", "MoE: ")
    # until then only the oracles of cases counted for the gate
    result.setdefault("detected_by", [Part.CASE.value] if result["detected_by_gate"] else [])
    return result


def payload(
    lines: Sequence[Line], controls: Sequence[tuple[Control, Outcome]], *, commit: str = ""
) -> dict[str, Any]:
    """The JSON of a record. `commit`: the one at which all of this was seen."""
    return {
        "faults": {line.fault.name: _fault_payload(line, commit) for line in lines},
        "controls": {
            control.name: {
                "digest": control.digest,
                "commit": commit,
                "fate": outcome.fate.value,
            }
            for control, outcome in controls
        },
    }


def _fault_payload(line: Line, commit: str) -> dict[str, Any]:
    parts = _parts_that_detected(line.outcome)
    return {
        "group": line.fault.group.value,
        "source": line.fault.source,
        "needs": line.fault.needs.value,
        "digest": line.fault.digest,
        "commit": commit,
        "fate": line.outcome.fate.value,
        "killers": list(line.outcome.killers),
        "detected_by": parts,
        "detected_by_gate": bool(parts),
        "baseline_suite": line.baseline.fate.value if line.baseline else None,
        "baseline_suite_killers": list(line.baseline.killers) if line.baseline else [],
    }


def _parts_that_detected(outcome: Outcome) -> list[str]:
    """The parts of the gate that failed, in the order of `Part`."""
    failed = {s.part for s in outcome.sightings if s.verdict is Verdict.FAIL}
    return [part.value for part in Part if part in failed]
