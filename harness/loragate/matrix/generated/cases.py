"""Cases that follow from a seed: valid, different, and within what a tier can run. Pure.

A list of cases shows what its authors thought of. Sizes that nobody chose show the rest: a plan
that is wrong between two thresholds, or where two axes meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice

from loragate.core.verdict import OracleName
from loragate.matrix.case import AXES, LAYER_SITES, Case, Execution, Site, Streams, Tier
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.generated.chance import Chance
from loragate.matrix.generated.shapes import SCALES, Point, Scale, choices_of, sizes_of
from loragate.matrix.ids import case_id
from loragate.matrix.relations import RELATIONS

_COMMON = (OracleName.REFERENCE, OracleName.EXACT, OracleName.BASE_ROWS, OracleName.CANARY)
# of these, which take several steps each, a case has a few
_FURTHER = (
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
    OracleName.ISOLATION,
    OracleName.RANGE,
    OracleName.WORK,
    OracleName.BATCH_INVARIANCE,
    OracleName.QUEUE,
    OracleName.HOT_PATH,
    OracleName.GUARD,
    OracleName.COMPILE,
)
_DRAWN_ORACLES = 2
# sizes that are tried for a choice of the other axes: with few of them those that many sizes do not
# fit, such as a cut over ranks, would be rare
_TRIES = 200
_TIMEOUT_S = 300.0
# cases in a row that do not fit
_MOST_IN_VAIN = 2000


def generate(
    site: Site, seed: int, size: int, tier: Tier, fits: Callable[[Case], bool] | None = None
) -> tuple[Case, ...]:
    """`size` cases of an operation, by id different; a larger number begins with the smaller.
    `fits`: those that do not are left out. Fewer than `size` where hardly any does."""
    cases = _different(site, seed, tier)
    return tuple(islice(cases if fits is None else _fitting(cases, fits), size))


def _fitting(cases: Iterator[Case], fits: Callable[[Case], bool]) -> Iterator[Case]:
    in_vain = 0
    for case in cases:
        if fits(case):
            in_vain = 0
            yield case
        elif (in_vain := in_vain + 1) == _MOST_IN_VAIN:
            return


def _different(site: Site, seed: int, tier: Tier) -> Iterator[Case]:
    seen = set[str]()
    for index in count():
        case = _case(site, f"{seed}/{site}/{tier}/{index}", tier)
        if case is not None and case_id(case) not in seen:
            seen.add(case_id(case))
            yield case


def _case(site: Site, seed: str, tier: Tier) -> Case | None:
    """None where no sizes were found for what was chosen."""
    scale, choices = SCALES[tier], choices_of(site, Chance(seed))
    # what no sizes could repair
    if not _fits_together(site, choices):
        return None
    for attempt in range(_TRIES):
        sizes = sizes_of(site, scale, Chance(f"{seed}/{attempt}"))
        case = Case(site=site, tier=tier, timeout_s=_TIMEOUT_S, **choices, **sizes)
        case = replace(case, oracles=_oracles(case))
        if _fits_together(site, _values(case)) and _is_within(case, scale):
            return _judged_further(case, scale, Chance(f"{seed}/oracles"))
    return None


def _judged_further(case: Case, scale: Scale, chance: Chance) -> Case:
    """The case with a few drawn oracles more, as far as there is memory for their copies."""
    for _ in range(_DRAWN_ORACLES):
        more = replace(case, oracles=(*case.oracles, chance.choice(_FURTHER)))
        if len(set(more.oracles)) == len(more.oracles) and _is_within(more, scale):
            case = more
    return case


def _oracles(case: Case) -> tuple[OracleName, ...]:
    """Those that judge a case of any size; of streams, not whether they gain anything."""
    streams = (OracleName.RACE, OracleName.SCHEDULE) if case.streams is Streams.DUAL else ()
    graph = (OracleName.GRAPH,) if case.execution is Execution.GRAPH else ()
    return (*_COMMON, *streams, *graph)


def _fits_together(site: Site, point: Point) -> bool:
    """Whether every relation holds whose axes all have a value."""
    return not any(
        next(relation.problems(**{axis: point[axis] for axis in relation.axes}), None)
        for relation in RELATIONS
        if site in relation.sites and point.keys() >= set(relation.axes)
    )


def _values(case: Case) -> Point:
    return {name: getattr(case, name) for name in AXES}


def _is_within(case: Case, scale: Scale) -> bool:
    work = scale.graph_work if case.execution is Execution.GRAPH else scale.work
    return _work(case) <= work and footprint_bytes(case) <= scale.bytes


def _work(case: Case) -> int:
    """Multiplications of the base products and of the adapters, from above."""
    columns = sum(case.slices)
    rows = case.tokens * case.top_k
    if case.site is Site.EMBEDDING:
        return rows * case.rank * columns
    delta = case.rank * (len(case.slices) * case.in_features + columns)
    if case.site is Site.MOE_LAYER:
        return rows * (case.in_features + case.rank) * 2 * columns + rows * delta
    return rows * (delta + (case.in_features * columns if case.site in LAYER_SITES else 0))
