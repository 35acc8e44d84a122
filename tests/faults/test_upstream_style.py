from __future__ import annotations

import os
from types import MappingProxyType

import pytest

# also where a GPU is at hand; the switch must stand before lorakernels is imported
os.environ["TRITON_INTERPRET"] = "1"

from loragate.faults import upstream_style
from loragate.verdict import Verdict

# the two kernel tests take their time; `loragate faults --stand-in` runs them on its controls
QUICK = [name for name in upstream_style.TESTS if not name.endswith("kernel")]


@pytest.mark.parametrize("name", QUICK)
def test_the_stand_in_passes_on_sound_code(name: str) -> None:
    sighting = upstream_style.run_test(name)
    assert sighting.verdict is Verdict.PASS, sighting.message


def test_whatever_is_thrown_counts_as_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TypeError("out of order")

    monkeypatch.setattr(upstream_style, "TESTS", MappingProxyType({"broken": fail}))
    sighting = upstream_style.run_test("broken")
    assert sighting.verdict is Verdict.FAIL
    assert "TypeError: out of order" in sighting.message
