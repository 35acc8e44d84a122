from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.core.warm_server import WarmServer
from loragate.faults import search
from loragate.faults.corpus import FAULTS
from loragate.faults.model import GateItem, Killer, Part, Sighting
from loragate.faults.order import Order
from loragate.faults.runner import Setup
from loragate.matrix.case import Site

DENSE = next(fault for fault in FAULTS if fault.edit.module == "lorakernels.dense.kernels")
MOE = next(fault for fault in FAULTS if fault.edit.module.startswith("lorakernels.moe."))
DELTA_NET = next(fault for fault in FAULTS if fault.edit.module == "lorakernels.gdn.ops")
EMBEDDING = next(fault for fault in FAULTS if fault.edit.module == "lorakernels.layers.embedding")
SHARED = next(fault for fault in FAULTS if fault.edit.module == "lorakernels.common.jit")

# never started: what a search would run is replaced
SERVER = WarmServer("loragate.faults.server", ProcessPool(), Path("server.txt"), {})


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """What a search runs, which detects nothing."""
    found: list[Order] = []

    def run(order: Order, *_: Any) -> tuple[Sighting, ...]:
        found.append(order)
        return ()

    monkeypatch.setattr(search, "run_order", run)
    return found


def answer(monkeypatch: pytest.MonkeyPatch, sightings: Sequence[Sighting]) -> tuple[Killer, ...]:
    """Of a search in which the fault fails like this, and the unchanged package passes."""
    passed = tuple(replace(s, verdict=Verdict.PASS, failure=None) for s in sightings)
    monkeypatch.setattr(search, "run_order", lambda *_: tuple(sightings))
    monkeypatch.setattr(search, "run_unchanged", lambda *_: passed)
    monkeypatch.setattr(search, "sound_orders", lambda *_: [None])
    return search.find_killers(DENSE, Setup(), SERVER)


def failed(judge: str, failure: Failure = Failure.WRONG_ANSWER, case: str = "a.case") -> Sighting:
    part = Part.CASE if case else Part.HOST_TEST
    return Sighting(judge=judge, case=case, verdict=Verdict.FAIL, failure=failure, part=part)


def test_a_search_runs_the_cases_of_the_tier_and_then_all_host_tests(orders: list[Order]) -> None:
    gate = Setup().gate
    assert search.find_killers(SHARED, Setup(), SERVER) == ()
    cases, tests = orders
    # engines are processes of their own, which a search does not start
    assert {case.site for case in cases.cases} == set(Site) - {Site.ENGINE}
    of_engines = [case for case in gate.cases.values() if case.site is Site.ENGINE]
    assert len(cases.cases) == len(gate.cases) - len(of_engines)
    assert (cases.tests, tests.cases) == ((), ())
    assert set(tests.tests) == gate.host_tests
    assert cases.first_only
    assert tests.first_only


def test_a_search_leaves_out_sites_that_the_fault_cannot_change(orders: list[Order]) -> None:
    search.find_killers(DENSE, Setup(), SERVER)
    search.find_killers(MOE, Setup(), SERVER)
    search.find_killers(DELTA_NET, Setup(), SERVER)
    search.find_killers(EMBEDDING, Setup(), SERVER)
    sites = [{case.site for case in order.cases} for order in orders if order.cases]
    assert sites == [
        {Site.DENSE_DELTA, Site.LORA_LINEAR, Site.GDN_IN_PROJ, Site.EMBEDDING},
        {Site.MOE_DELTA, Site.MOE_LAYER},
        {Site.GDN_IN_PROJ},
        {Site.EMBEDDING},
    ]


def test_a_search_names_the_case_with_each_oracle_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = Sighting(judge="canary", case="a.case", verdict=Verdict.PASS, part=Part.CASE)
    item = GateItem(Part.CASE, "a.case")
    assert answer(monkeypatch, [failed("reference"), passed, failed("exact")]) == (
        Killer(item, OracleName.REFERENCE),
        Killer(item, OracleName.EXACT),
    )
    thrown = failed("reference", Failure.EXCEPTION)
    assert answer(monkeypatch, [thrown]) == (Killer(item, Failure.EXCEPTION),)


def test_a_search_names_the_host_test_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests/kernels/test_a.py::test_b"
    found = answer(monkeypatch, [failed(name, case="")])
    assert found == (Killer(GateItem(Part.HOST_TEST, name)),)


def test_a_search_does_not_name_what_fails_without_the_fault_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "tests/kernels/test_a.py::test_b"
    monkeypatch.setattr(search, "run_order", lambda *_: (failed(name, case=""),))
    monkeypatch.setattr(search, "run_unchanged", lambda *_: (failed(name, case=""),))
    with pytest.raises(search.NotSound, match=f"{name} fails without a fault"):
        search.find_killers(DENSE, Setup(), SERVER)
