"""The compile leg as a process: `python -m loragate.compile_leg.process EVENTS RUN SUBJECT...`"""

from __future__ import annotations

import sys
from pathlib import Path

from loragate import compile_leg
from loragate.core.verdict import EXIT_CODES, worst
from loragate.events.log import EventWriter


def main(events: str, run: str, *subjects: str) -> int:
    """The exit code of the worst verdict of all subjects."""
    with EventWriter(Path(events), run=run) as writer:
        verdicts = [compile_leg.run(writer, subject=subject) for subject in subjects]
    return EXIT_CODES[worst(verdicts)].value


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
