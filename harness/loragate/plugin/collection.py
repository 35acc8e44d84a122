"""Makes one pytest item of each selected run, with the id of the run as its id.

Invariant: a session with a mistake in its selection ends before it starts workers, collects tests
or touches a report. Only the process that the user has started says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from loragate.findings.ledger import Finding, any_loses_device
from loragate.findings.load import own_findings
from loragate.matrix.case import Case
from loragate.matrix.case_run import CaseRun
from loragate.matrix.load import load_cases
from loragate.matrix.selection import Selection, select_runs
from loragate.plugin.options import recorded_durations, selection_of
from loragate.plugin.running_order import Workers, may_begin, running_order, workers_of
from loragate.run.folder import check_durations, check_run
from loragate.subjects.registry import check_subject_name

# a test function that takes this argument is run once for every selected run
_ARGUMENT = "case_run"
# the id of the only item where no case was selected; that of an ordinary test may be shorter
_NO_CASE = "loragate-no-case"
_RUNS = pytest.StashKey[dict[str, CaseRun]]()
_RUNS_OF_NODES = pytest.StashKey[dict[str, CaseRun]]()
_FINDINGS = pytest.StashKey[tuple[Finding, ...]]()
_CASES = pytest.StashKey[tuple[Case, ...]]()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not _asks_for_cases(config):
        return
    mark = config.pluginmanager.get_plugin("mark")
    if mark is not None:
        # UsageError for a wrong -k or -m, which would end workers without a word
        mark.pytest_collection_modifyitems([], config)
    try:
        for name in selection_of(config).subjects:
            check_subject_name(name)
        option = config.option
        if option.loragate_durations:
            check_durations(Path(option.loragate_durations), Path(option.loragate_report))
        if option.loragate_run:
            check_run(Path(option.loragate_report), option.loragate_run)
        selected_runs(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _asks_for_cases(config: pytest.Config) -> bool:
    """Whether an option or a path on the command line means the cases: loading them takes a second
    that ordinary tests need not wait for."""
    option = config.option
    if option.loragate_cases or option.loragate_matrix or option.loragate_subject:
        return True
    return paths_hold_cases(config)


def paths_hold_cases(config: pytest.Config) -> bool:
    """Whether a path on the command line means the cases, alone or with ordinary tests."""
    cases = _cases_folder(config)
    return any(
        path == cases or path in cases.parents or cases in path.parents
        for path in _asked_paths(config)
    )


def asks_for_cases_alone(config: pytest.Config) -> bool:
    """Whether a session has no ordinary tests."""
    cases = _cases_folder(config)
    return all(path == cases or cases in path.parents for path in _asked_paths(config))


def _cases_folder(config: pytest.Config) -> Path:
    return (config.rootpath / "cases").resolve()


def _asked_paths(config: pytest.Config) -> list[Path]:
    folder = config.invocation_params.dir
    return [Path(folder, arg.partition("::")[0]).resolve() for arg in config.args]


# last: by then all other parameters are known
@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _ARGUMENT not in metafunc.fixturenames:
        return
    if metafunc._calls:
        # all that the controller knows of a test is its id
        name = metafunc.function.__name__
        why = f"has parameters besides {_ARGUMENT}, and the id of a test has to be that of its run"
        raise pytest.Collector.CollectError(f"{name}: {why}")
    try:
        runs = selected_runs(metafunc.config)
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    if not runs:
        skip = pytest.mark.skip(reason=without_cases(metafunc.config))
        metafunc.parametrize(_ARGUMENT, [pytest.param(None, marks=skip, id=_NO_CASE)])
        return
    metafunc.parametrize(_ARGUMENT, runs.values(), ids=runs.keys())


def without_cases(config: pytest.Config) -> str:
    return f"no case of tier {selection_of(config).tier} was selected"


def stands_for_no_case(nodeid: str) -> bool:
    """Whether an item is all that there is of a test of cases, because none was selected."""
    return nodeid.endswith(f"[{_NO_CASE}]")


def selected_runs(config: pytest.Config) -> dict[str, CaseRun]:
    """Selected runs by id, in running order. Raises ValueError for a mistake of the user."""
    if _RUNS not in config.stash:
        selected = selected_trials(config, selection_of(config))
        ordered = running_order(
            selected,
            durations=recorded_durations(config).cases,
            workers=workers_of(config),
            alone=lambda run: loses_device(config, run.run_id),
        )
        config.stash[_RUNS] = {run.id: run for run in ordered}
    return config.stash[_RUNS]


def selected_trials(config: pytest.Config, selection: Selection) -> tuple[CaseRun, ...]:
    """Sorted. Raises ValueError for a mistake of the user."""
    return select_runs(selection, all_cases(config), once=partial(loses_device, config))


def loses_device(config: pytest.Config, run_id: str) -> bool:
    """Whether a finding lists that the device no longer answers after a case, of whatever version:
    all workers must see the same."""
    if _FINDINGS not in config.stash:
        config.stash[_FINDINGS] = own_findings()
    findings = config.stash[_FINDINGS]
    return any_loses_device(findings, run_id)


def num_first(runs: Iterable[CaseRun], config: pytest.Config, workers: Workers) -> int:
    """How many of the runs of a session begin it, with a device for themselves."""
    listed = [run for run in runs if loses_device(config, run.run_id)]
    return len(listed) if may_begin(listed, workers) else 0


def all_cases(config: pytest.Config) -> tuple[Case, ...]:
    """The cases of the selected files. Raises ValueError for errors in them."""
    if _CASES not in config.stash:
        # sampling large products takes seconds
        config.stash[_CASES] = load_cases(selection_of(config).matrix)
    return config.stash[_CASES]


def case_run_of(item: pytest.Item) -> CaseRun | None:
    """The run that an item represents; None if it is an ordinary test."""
    callspec = getattr(item, "callspec", None)
    run = callspec.params.get(_ARGUMENT) if callspec is not None else None
    return run if isinstance(run, CaseRun) else None


def case_run_of_id(config: pytest.Config, nodeid: str) -> CaseRun | None:
    """The run of a node id that a worker has reported; None if it is an ordinary test."""
    if _RUNS_OF_NODES not in config.stash:
        runs = selected_runs(config)
        # pytest escapes what is not ASCII, as the name of a subject may be, unless its options say
        # that it should not
        escaped = {name.encode("unicode_escape").decode(): run for name, run in runs.items()}
        config.stash[_RUNS_OF_NODES] = runs | escaped
    _, bracket, rest = nodeid.partition("[")
    return config.stash[_RUNS_OF_NODES].get(rest.removesuffix("]")) if bracket else None
