"""The command that shows again what a scan saw: `loragate replay` under the conditions of a trial,
so often that a flake of the diagnosed rate shows. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from loragate.history.model import TrialRecord
from loragate.nightly.conditions import PLAIN, Cause, Memory
from loragate.nightly.suspects import Diagnosis
from loragate.nightly.wave import Measure

# a flake stays hidden in so few replays of a hundred
_ERROR = 0.01
# of a factor that changes every result a second trial is made, because few were seen
_HIGHEST_RATE = 0.9
# where nobody knows how often it shows
_UNKNOWN_TIMES = 40
# in the conditions of a record: what has to run before, which is no factor
AFTER = "after"


def replay_of_trial(seen: TrialRecord) -> str:
    """The command for a trial of which nothing more is known."""
    varied = {name: value for name, value in seen.conditions.items() if name != AFTER}
    if seen.measure == Measure.JUDGED and not varied:
        # judged as the gate does it, with the evidence of every oracle
        return seen.replay
    return _command(seen, varied, (), _UNKNOWN_TIMES)


def replay_of_diagnosis(diagnosis: Diagnosis, seen: TrialRecord) -> str:
    """The command for a suspect, `seen`, whose cause was looked for."""
    if diagnosis.cell is None:
        return replay_of_trial(seen)
    if diagnosis.cause is Cause.ALWAYS and seen.measure == Measure.JUDGED:
        return seen.replay
    conditions = diagnosis.cell.conditions
    if diagnosis.cause is Cause.MEMORY:
        # what fresh memory holds by chance is another thing in another process
        conditions = replace(PLAIN, gpu=conditions.gpu, memory=Memory.POISON)
    elif diagnosis.is_held:
        # it changes where nothing is held fast
        conditions = replace(PLAIN, gpu=conditions.gpu)
    times = times_to_show(diagnosis.changed, diagnosis.tried)
    return _command(seen, conditions.varied(), diagnosis.cell.before, times)


def times_to_show(changed: int, tried: int) -> int:
    """Trials of which one shows a change that `changed` of `tried` have shown."""
    rate = min(changed / tried, _HIGHEST_RATE)
    return math.ceil(math.log(_ERROR) / math.log(1 - rate))


def _command(
    seen: TrialRecord, varied: Mapping[str, str], before: Iterable[str], times: int
) -> str:
    """varied: factors by name, of any version of loragate. before: ids of wanted trials of the same
    measure."""
    words = ["--measure", seen.measure, "--times", str(times)]
    for name, value in varied.items():
        words += [f"--{name}", value]
    for wanted in before:
        words += ["--after", wanted.removesuffix(f" ({seen.measure})")]
    return f"{seen.replay} {shlex.join(words)}"
