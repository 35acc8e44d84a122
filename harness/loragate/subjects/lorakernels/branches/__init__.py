"""Which branches of their plans a case takes in lorakernels: what the matrix covers of them.

A branch is a line of text, such as "dense shrink: K is split". All of it follows from the plan
functions, for the first batch of a case. What exists is found by asking them for a grid of sizes
on both sides of every threshold: a new branch of a plan is a new row of the table, without a case.
"""

from __future__ import annotations

from loragate.subjects.lorakernels.branches.cases import branches
from loragate.subjects.lorakernels.branches.grids import all_branches

__all__ = ["all_branches", "branches"]
