"""What a scan says while it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loragate.history import Outcome, TrialRecord
from loragate.nightly.conditions import PLAIN
from loragate.nightly.wave import Measure, Wanted, Wave
from loragate.scan.progress import Progress

NewTrial = Callable[..., TrialRecord]

_WAVE = Wave(processes=((PLAIN, (Wanted(case="a", draw=0, measure=Measure.BITS),)),))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def progress(lines: list[str]) -> Progress:
    return Progress(lines.append)


def test_many_short_waves_have_a_line_in_five_seconds_with_all_their_trials(
    progress: Progress, lines: list[str], trial: NewTrial
) -> None:
    for number in range(500):
        progress.tell(number / 20, number, _WAVE, [trial(), trial()])
    progress.close(25.0)
    assert len(lines) == 6
    assert lines[0].endswith("0 s  wave 0: 2 trials, now bits with nothing varied")
    assert lines[1].endswith("5 s  waves 1 to 100: 200 trials, now bits with nothing varied")
    assert lines[-1].endswith("25 s  waves 401 to 499: 198 trials")


def test_while_a_wave_lasts_there_is_a_line_in_five_seconds(
    progress: Progress, lines: list[str], trial: NewTrial
) -> None:
    progress.tell(0.0, 0, _WAVE, [trial()])
    for tenth in range(1, 121):
        progress.meanwhile(tenth / 10, 1, tenth)
    assert [line.strip() for line in lines[1:]] == [
        "5 s  wave 1 is running: 50 trials since the last report of a wave",
        "10 s  wave 1 is running: 100 trials since the last report of a wave",
    ]
    # what the wave returns counts once
    progress.tell(16.0, 1, _WAVE, [trial()] * 160)
    assert lines[-1].endswith("16 s  wave 1: 160 trials, now bits with nothing varied")


def test_what_looks_odd_is_told_at_once_and_again_with_the_next_line(
    progress: Progress, lines: list[str], trial: NewTrial
) -> None:
    progress.tell(0.0, 0, _WAVE, [trial()])
    progress.tell(1.0, 1, _WAVE, [trial(), trial(outcome=Outcome.DIFFERENT)])
    progress.tell(2.0, 2, _WAVE, [trial(outcome=Outcome.WRONG)])
    progress.tell(3.0, 3, _WAVE, [trial(case="b", outcome=Outcome.WRONG)])
    assert [line.partition(": ")[2].partition(", now")[0] for line in lines] == [
        "1 trial",
        "2 trials",
        "2 trials",
    ]
    assert ["not as they should be" in line for line in lines] == [False, True, True]
    progress.close(4.0)
    assert len(lines) == 3
