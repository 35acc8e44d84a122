"""The compile leg as a process: `python -m loragate.compile_leg.process EVENTS RUN TIER SUBJECT...`

The nightly tier compiles what the baseline has on record as well.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from loragate import compile_leg
from loragate.core.errors import exit_code_of
from loragate.core.verdict import EXIT_CODES, worst
from loragate.events.log import EventWriter
from loragate.matrix.case import Tier


def main(events: str, run: str, tier: str, *subjects: str) -> int:
    """The exit code of the worst verdict of all subjects."""
    everything = Tier(tier) is Tier.NIGHTLY
    with EventWriter(Path(events), run=run) as writer:
        verdicts = [
            compile_leg.run(writer, subject=subject, everything=everything) for subject in subjects
        ]
    return EXIT_CODES[worst(verdicts)].value


if __name__ == "__main__":
    sys.exit(exit_code_of(partial(main, *sys.argv[1:])))
