"""What scans have seen, night after night: one database for a machine or for a team.

Invariant: a record is only ever added. A trial is known by the run that it belongs to and its
number there, so that adding it twice changes nothing.
"""

from loragate.history.model import (
    DatabaseFailedError,
    HistoryError,
    Outcome,
    PathFiles,
    Purpose,
    ScanRun,
    TrialRecord,
)
from loragate.history.store import History, open_history

__all__ = [
    "DatabaseFailedError",
    "History",
    "HistoryError",
    "Outcome",
    "PathFiles",
    "Purpose",
    "ScanRun",
    "TrialRecord",
    "open_history",
]
