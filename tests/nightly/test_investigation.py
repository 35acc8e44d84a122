"""What an investigation takes the trials for that it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from loragate.history import Outcome, TrialRecord
from loragate.nightly.suspects import Suspect
from loragate.nightly.wave import Measure, Place
from loragate.scan import investigate
from loragate.scan.investigate import Investigation


def suspect_of(monkeypatch: pytest.MonkeyPatch, *seen: TrialRecord) -> Suspect:
    asked: list[Suspect] = []
    monkeypatch.setattr(investigate, "diagnose", lambda suspect, _: asked.append(suspect))
    Investigation(cast(Any, None), cast(Any, None), Place(), until=0.0).run(seen, {})
    (suspect,) = asked
    return suspect


def test_a_trial_that_changed_its_bits_is_unlike_those_that_began_with_the_same_ones(
    monkeypatch: pytest.MonkeyPatch, trial: Callable[..., TrialRecord]
) -> None:
    changed = trial(2, outcome=Outcome.DIFFERENT, measure=Measure.BITS, digest="aa")
    suspect = suspect_of(monkeypatch, trial(0), trial(1), changed)
    usual, again, odd = (sighting.signature for sighting in suspect.sightings)
    assert usual == again == "aa"
    assert odd != usual
    assert not suspect.wrong


def test_a_wrong_trial_has_its_kind_of_failure_in_place_of_bits(
    monkeypatch: pytest.MonkeyPatch, trial: Callable[..., TrialRecord]
) -> None:
    wrong = trial(
        1, outcome=Outcome.WRONG, measure=Measure.JUDGED, digest="", failure="wrong_answer"
    )
    suspect = suspect_of(monkeypatch, trial(0), wrong)
    assert suspect.wrong == {f"{Outcome.WRONG} wrong_answer"}
    assert [sighting.signature for sighting in suspect.sightings] == ["aa", *suspect.wrong]
