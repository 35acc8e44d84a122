"""Workers of a scan in real processes: who waits for whom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from loragate.core.gpu_health import NoHealth
from loragate.history import History, Purpose, ScanRun, open_history
from loragate.matrix.case_run import CaseRun
from loragate.matrix.load import load_cases
from loragate.nightly.conditions import Conditions
from loragate.nightly.wave import Measure, Wanted, Wave
from loragate.scan.processes import Processes
from loragate.scan.surroundings import Surroundings
from loragate.scan.waves import Waves, alone

pytestmark = pytest.mark.usefixtures("preloaded")

_SUBJECT = "planted_subjects:Waiting"
_MATRIX = (Path(__file__).parent / "planted" / "planted.yaml",)
_RUNS = {
    run.case.tokens: run
    for run in (CaseRun(_SUBJECT, case, matrix=_MATRIX) for case in load_cases(_MATRIX))
}
_BESIDE = Conditions(neighbours=1)
# a trial of 4 tokens waits
_WAITING = 4
_NEVER = float("inf")
# after which nothing waits any more, so that a test fails and does not hang
_PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def processes(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes([_SUBJECT], tmp_path_factory.mktemp("scan") / "log") as started:
        yield started


@pytest.fixture
def history(tmp_path: Path, scan_run: Callable[..., ScanRun]) -> Iterator[History]:
    with open_history(tmp_path / "h.db") as opened:
        opened.add_run(scan_run())
        yield opened


@pytest.fixture
def waves(tmp_path: Path, processes: Processes, history: History) -> Iterator[Waves]:
    around = Surroundings(
        run="night-1",
        runs={run.run_id: run for run in _RUNS.values()},
        history=history,
        processes=processes,
        health=NoHealth(),
        folder=tmp_path,
    )
    started = Waves(around)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def go(environment: None) -> Iterator[Path]:
    """A file that ends the waiting."""
    folder = Path(os.environ["TMPDIR"])
    file = folder / "planted.go"
    timer = Timer(_PATIENCE_S, file.touch)
    timer.start()
    yield file
    timer.cancel()
    for file in folder.glob("planted.*"):
        file.unlink()


def _wanted(tokens: int, draw: int = 0) -> Wanted:
    return Wanted(case=_RUNS[tokens].run_id, draw=draw, measure=Measure.BITS)


def _beside(*workers: tuple[Wanted, ...]) -> Wave:
    return Wave(processes=tuple((_BESIDE, wanted) for wanted in workers))


def _wait_for_the_long_trial(go: Path) -> None:
    """Until it runs."""
    while not go.with_name("planted.waiting").exists():
        time.sleep(0.01)


def _recorded(history: History) -> list[tuple[int, int]]:
    """Tokens and draw of all trials, in their order."""
    return [(int(t.case.rpartition("-")[2]), t.draw) for t in history.trials()]


def _short_ones(history: History, before: int) -> int:
    return sum(tokens == 3 for tokens, _ in _recorded(history)[before:])


def test_a_worker_goes_on_with_later_waves_while_a_trial_of_another_one_runs(
    waves: Waves, history: History, go: Path
) -> None:
    for draw in range(3):
        shown = waves.keep_busy(
            _beside((_wanted(_WAITING, draw),), (_wanted(3, draw),)), until=_NEVER
        )
        assert [each.wanted for each in shown] == [_wanted(3, draw)]
        # each part of a wave is a process of its own, beside the one that waits
        assert shown[0].order == (_wanted(3, draw),)
        assert shown[0].record.conditions == {"neighbours": "1"}
    assert _recorded(history) == [(3, 0), (3, 1), (3, 2)]
    assert len({trial.process for trial in history.trials()}) == 3
    go.touch()
    while (_WAITING, 2) not in _recorded(history):
        waves.keep_busy(_beside((_wanted(5),), (_wanted(5),)), until=_NEVER)
    # in its turn, and nothing of what it had to do meanwhile is left out
    waited = [draw for tokens, draw in _recorded(history) if tokens == _WAITING]
    assert waited == [0, 1, 2]


def test_what_has_ended_is_counted_while_all_workers_are_busy(waves: Waves, go: Path) -> None:
    counted: list[int] = []

    def meanwhile(ended: int) -> None:
        counted.append(ended)
        if ended == 2:
            go.touch()

    first = (_wanted(3), _wanted(5), _wanted(_WAITING))
    shown = waves.keep_busy(
        _beside(first, (_wanted(_WAITING, 1), _wanted(_WAITING, 2))),
        until=_NEVER,
        meanwhile=meanwhile,
    )
    assert 2 in counted
    assert counted == sorted(counted)
    assert len(shown) >= 3


def test_a_wave_alone_waits_for_trials_that_run_and_leaves_out_those_behind_them(
    waves: Waves, history: History, go: Path
) -> None:
    waves.keep_busy(_beside((_wanted(_WAITING), _wanted(5, 1)), (_wanted(3),)), until=_NEVER)
    _wait_for_the_long_trial(go)
    go.touch()
    shown = waves.run(alone([_wanted(3, 2)], Conditions()), Purpose.PLANNED, until=_NEVER)
    assert [each.wanted for each in shown] == [_wanted(3, 2)]
    assert _recorded(history) == [(3, 0), (_WAITING, 0), (3, 2)]
    assert waves.spent.alone_s > 0
    # of the trial that was waited for the caller hears next
    shown = waves.keep_busy(_beside((_wanted(5, 3),), (_wanted(5, 3),)), until=_NEVER)
    assert _wanted(_WAITING) in [each.wanted for each in shown]


def test_free_workers_have_short_trials_until_a_long_one_has_ended(
    waves: Waves, history: History, go: Path
) -> None:
    waves.keep_busy(_beside((_wanted(_WAITING), _wanted(5, 1)), (_wanted(3),)), until=_NEVER)
    _wait_for_the_long_trial(go)
    given = 0

    def short() -> Wave:
        nonlocal given
        given += 1
        if given == 3:
            go.touch()
        return _beside((_wanted(3, given),), (_wanted(3, given),))

    shown = waves.run(
        alone([_wanted(5, 2)], Conditions()), Purpose.PLANNED, until=_NEVER, short=short
    )
    assert [each.wanted for each in shown] == [_wanted(5, 2)]
    *beside, last = _recorded(history)
    # with nothing beside it, and what stood behind the long trial is left out
    assert last == (5, 2)
    assert {(3, 1), (3, 2), (_WAITING, 0)} < set(beside)
    assert (5, 1) not in beside


def test_a_worker_with_short_trials_goes_on_until_the_long_one_of_another_has_ended(
    waves: Waves, history: History, go: Path
) -> None:
    # what a trial takes is known once it has run
    waves.run(alone([_wanted(3)], Conditions()), Purpose.PLANNED, until=_NEVER)
    many = tuple(_wanted(3, draw) for draw in range(1, 400))
    waves.keep_busy(_beside((_wanted(_WAITING),), many, (_wanted(5),)), until=_NEVER)
    _wait_for_the_long_trial(go)
    # the first trial of a process takes longer than the others
    while _short_ones(history, 0) < 4:
        another = (_wanted(_WAITING, 1),), (_wanted(3),), (_wanted(5),)
        waves.keep_busy(_beside(*another), until=_NEVER)
    before = len(_recorded(history))

    def look() -> None:
        # for as long as a worker is free and the long trial runs
        if _short_ones(history, before) > 5:
            go.touch()

    waves.run(alone([_wanted(5, 1)], Conditions()), Purpose.PLANNED, until=_NEVER, short=look)
    beside = _recorded(history)[before:]
    # more than the one trial that it was in
    assert _short_ones(history, before) > 5
    assert beside[-1] == (5, 1)


def test_nothing_runs_alone_while_a_trial_does_not_end(waves: Waves, history: History) -> None:
    waves.keep_busy(_beside((_wanted(_WAITING),), (_wanted(3),)), until=_NEVER)
    assert waves.run(alone([_wanted(5)], Conditions()), Purpose.PLANNED, until=0.0) == []
    assert _recorded(history) == [(3, 0)]


def test_what_runs_at_the_end_is_ended_and_lost(waves: Waves, history: History) -> None:
    waves.keep_busy(_beside((_wanted(_WAITING),), (_wanted(3),)), until=_NEVER)
    (waiting, *_) = [each for each in waves._busy() if each.wanted == (_wanted(_WAITING),)]
    assert waiting.process.status is None
    waves.close()
    assert waiting.process.status == -9
    assert _recorded(history) == [(3, 0)]
