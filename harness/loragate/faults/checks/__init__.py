"""Checks of host logic that no case of the matrix reaches, each against a plain second
implementation.

They cover what an oracle could judge only with a file, a model or a mapping that the protocol of
subjects does not have. A check returns a sentence about what is wrong, or None.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType

from loragate.core.verdict import Failure, Verdict
from loragate.faults import compiling
from loragate.faults.checks import (
    activation,
    expert_layer,
    expert_slots,
    far_pairs,
    folders,
    pair_plans,
    pair_tables,
    parallel,
    rows,
    tables,
)
from loragate.faults.model import Check, Sighting

CHECKS: Mapping[Check, Callable[[], str | None]] = MappingProxyType(
    {
        Check.METADATA: tables.check_metadata,
        Check.DUMMY_RUN: tables.check_dummy_run,
        Check.WORKSPACE: tables.check_workspace,
        Check.FAR_ROWS: rows.check_far_rows,
        Check.QUEUED_STEPS: rows.check_queued_steps,
        Check.LAUNCH_ORDER: rows.check_launch_order,
        Check.PARTITION: parallel.check_partition,
        Check.PACKING: parallel.check_packing,
        Check.ACTIVATION: activation.check_activation,
        Check.PEFT_SCALE: folders.check_peft_scale,
        Check.BINDING: folders.check_binding,
        Check.COMPILES: compiling.check_compiles,
        Check.EXPERT_COMPILES: compiling.check_experts_compile,
        Check.PAIRS: pair_tables.check_pairs,
        Check.PAIR_PLANS: pair_plans.check_pair_plans,
        Check.PAIR_WORKSPACE: pair_tables.check_pair_workspace,
        Check.FAR_PAIRS: far_pairs.check_far_pairs,
        Check.PAIR_ORDER: far_pairs.check_pair_order,
        Check.EXPERT_LAYER: expert_layer.check_expert_layer,
        Check.EXPERT_QUANTISED: expert_layer.check_expert_quantised,
        Check.EXPERT_RANKS: expert_layer.check_expert_ranks,
        Check.EXPERT_SLOTS: expert_slots.check_expert_slots,
        Check.EXPERT_FILES: expert_slots.check_expert_files,
    }
)


def run_check(check: Check) -> Sighting:
    """The result of the check; an exception counts as a failure."""
    verdict, failure, message = Verdict.PASS, None, ""
    try:
        wrong = CHECKS[check]()
        if wrong is not None:
            verdict, failure, message = Verdict.FAIL, Failure.WRONG_ANSWER, wrong
    except rows.Unable as reason:
        verdict, message = Verdict.SKIP, str(reason)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({last.name}:{last.lineno})"
        verdict, failure = Verdict.FAIL, Failure.EXCEPTION
    return Sighting(judge=check, case="", verdict=verdict, failure=failure, message=message)
