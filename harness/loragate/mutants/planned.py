"""`python -m loragate.mutants.planned TIER`: the run ids of the gate of this machine, one a line.

It runs apart, because planning imports lorakernels.
"""

from __future__ import annotations

import sys

from loragate.core.checkout import project_root
from loragate.matrix.case import Tier
from loragate.matrix.load import default_files
from loragate.matrix.selection import Selection
from loragate.mutants.planting import SUBJECT
from loragate.run.planning import plan_selection


def main(tier: str) -> int:
    selection = Selection(
        matrix=default_files(project_root()), subjects=(SUBJECT,), tier=Tier(tier)
    )
    plan, _ = plan_selection(selection)
    print("\n".join(run.run_id for run in plan.planned))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
