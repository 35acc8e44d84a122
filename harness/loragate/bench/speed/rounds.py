"""Rounds of both builds in turns: what is compared is measured within milliseconds.

Invariant: no build is favoured by its place in a round, because the order is drawn for each round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from loragate.bench.speed.lanes import Lane
from loragate.bench.speed.statistics import Samples, without_control
from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode

ROUNDS = 40
# of each build, as many as there is memory for: with two, chance moves a call of a few us by so
# much that 5 % hide in it
FEWEST_PROCESSES, MOST_PROCESSES = 2, 6

# [builds, processes]: the build that is compared against, then the present one
Lanes = Sequence[Sequence[Lane]]
# by the name of a call that of another one, which is a part of it and the same in both builds
Controls = Mapping[str, str]
NO_CONTROLS: Controls = MappingProxyType({})


def sample_row(
    row: str, lanes: Lanes, generator: np.random.Generator, controls: Controls = NO_CONTROLS
) -> tuple[Samples, ...]:
    """Time the next row of all lanes, which must be `row`: one Samples for each of its calls that
    is not a control. Raises CommandError.
    """
    flat = [lane for of_build in lanes for lane in of_build]
    calls = [lane.calls() for lane in flat]
    if len(set(calls)) != 1:
        given = "; ".join(", ".join(names) for names in dict.fromkeys(calls))
        message = f"{row}: the builds have different calls, which cannot be compared ({given})"
        raise CommandError(message, ExitCode.INCOMPLETE)
    us = np.empty((len(calls[0]), len(flat), ROUNDS))
    for round_number in range(ROUNDS):
        for position in generator.permutation(len(flat)):
            us[:, position, round_number] = flat[position].time()
    for lane in flat:
        lane.leave()
    by_call = dict(zip(calls[0], us.reshape(-1, len(lanes), len(lanes[0]), ROUNDS), strict=True))
    return tuple(
        Samples(row, call, without_control(times, by_call[controls[call]]))
        if call in controls
        else Samples(row, call, times)
        for call, times in by_call.items()
        if call not in controls.values()
    )
