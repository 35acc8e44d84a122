from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.commands import findings as cli
from loragate.core.checkout import Tree
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import EventWriter
from loragate.events.model import LegFinished, RunStarted
from loragate.findings import probe_runner, vllm_probes
from loragate.findings.ledger import Finding, Observation, Seen
from loragate.findings.probing import Probe, dense_probe, moe_probe
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.records import recorder
from loragate.records.results import read_section
from loragate.run.legs import GateSetup, legs_of

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.parametrize(("subjects", "tried"), [(("vllm",), True), (("lorakernels",), False)])
def test_the_gate_tries_the_findings_of_a_subject_that_it_checks(
    subjects: tuple[str, ...], tried: bool
) -> None:
    selection = Selection(matrix=(), subjects=subjects, tier=Tier.SMOKE)
    setup = GateSetup(run="r", report=Path("report"), selection=selection, has_gpu=False)
    commands = {leg.name: leg.command[1:] for leg in legs_of(setup)}
    record = (f"--events={Path('report') / 'events.jsonl'}", "--run=r")
    command = ("-m", "loragate", "findings", *record)
    assert commands.get("findings") == (command if tried else None)
    on_gpu = {leg.name: leg.command[1:] for leg in legs_of(replace(setup, has_gpu=True))}
    assert on_gpu.get("findings") == ((*command, "--after-leg=gpu") if tried else None)
    assert next(iter(on_gpu)) == "gpu"


@pytest.mark.parametrize("legs", [("gpu", "findings"), ("interpreter", "findings")])
def test_probes_that_may_lose_the_device_wait_for_the_end_of_the_leg_if_the_run_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legs: tuple[str, ...]
) -> None:
    events, answers = tmp_path / "events.jsonl", list[bool]()
    start = RunStarted(run="r", started_at="", tier=Tier.SMOKE, subjects=(), legs=legs, expected=())
    end = LegFinished(name="gpu", verdict=Verdict.PASS, exit_code=0, duration_s=1.0, log_path="")

    def run_probes(
        groups: Sequence[Sequence[str]], *, last: Sequence[str], may_be_last: Callable[[], bool]
    ) -> tuple[str, dict[str, Observation]]:
        answers.append(may_be_last())
        with EventWriter(events, run="other") as writer:
            writer.write(end)
        answers.append(may_be_last())
        with EventWriter(events, run="r") as writer:
            writer.write(end)
        answers.append(may_be_last())
        names = [name for group in (*groups, last) for name in group]
        return "0.26.0", {name: Observation(Seen.REPRODUCED, "seen") for name in names}

    monkeypatch.setattr(probe_runner, "run_probes", run_probes)
    with EventWriter(events, run="r") as writer:
        writer.write(start)
    assert main(["findings", f"--events={events}", "--run=r", "--after-leg=gpu"]) == ExitCode.OK
    assert answers == [legs[0] != "gpu"] * 2 + [True]


@pytest.mark.parametrize(
    ("seen", "exit_code"),
    [
        (Seen.REPRODUCED, ExitCode.OK),
        (Seen.ABSENT, ExitCode.WRONG),
        (Seen.BROKEN, ExitCode.INFRASTRUCTURE),
    ],
)
def test_a_single_finding_decides_wherever_it_is_listed(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, exit_code: ExitCode
) -> None:
    def try_probes(findings: Sequence[Finding], _: object) -> tuple[str, dict[str, Observation]]:
        names = [f.probe for f in findings if f.probe and f.covers("0.26.0")]
        reproduced = dict.fromkeys(names, Observation(Seen.REPRODUCED, "seen"))
        others = [f.probe for f in findings if f.probe]
        unseen = dict.fromkeys(others, Observation(Seen.NOT_TRIED, "of another version"))
        return "0.26.0", unseen | reproduced | {names[-1]: Observation(seen, "as it was")}

    monkeypatch.setattr(cli, "_try_probes", try_probes)
    assert main(["findings"]) == exit_code


def test_nothing_says_when_a_leg_has_ended_without_the_events_of_its_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["findings", "--after-leg=gpu"]) == ExitCode.USAGE
    assert "--after-leg needs --events" in capsys.readouterr().err


def test_a_page_that_tries_nothing_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "--page", "--record=x.json"]) == ExitCode.USAGE
    assert "--page tries nothing to record; leave out --record" in capsys.readouterr().err


def test_a_record_names_the_code_as_it_was_before_the_first_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checkout = tmp_path / "gpu.json", ["as it began"]

    def try_probes(findings: Sequence[Finding], _: object) -> tuple[str, dict[str, Observation]]:
        checkout[0] = "edited meanwhile"
        seen = Observation(Seen.REPRODUCED, "seen")
        return "0.26.0", {finding.probe: seen for finding in findings if finding.probe}

    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: (checkout[0], Tree.CLEAN))
    monkeypatch.setattr(cli, "_try_probes", try_probes)
    assert main(["findings", "--record", str(path)]) == ExitCode.OK
    section = read_section(path, cli.SECTION)
    assert section is not None
    assert (section["commit"], section["tree"]) == ("as it began", "clean")
    assert section["executed"] > 0


@pytest.mark.parametrize("make", [dense_probe, moe_probe])
def test_probes_of_wrong_addresses_run_last_and_in_a_process_without_any_other(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Probe]
) -> None:
    def observe(*_: object) -> Observation:
        return Observation(Seen.REPRODUCED, "seen")

    processes = list[set[str]]()

    def run_probes(
        groups: Sequence[Sequence[str]], *, last: Sequence[str], **_: object
    ) -> tuple[str, dict[str, Observation]]:
        processes.extend(map(set, (*groups, last)))
        return "0.26.0", {name: observe() for name in set().union(*processes)}

    added = {"calm": make(observe), "wild": make(observe, wild=True)}
    monkeypatch.setattr(vllm_probes, "PROBES", {**vllm_probes.PROBES, **added})
    monkeypatch.setattr(probe_runner, "run_probes", run_probes)
    assert main(["findings"]) == ExitCode.OK
    *others, last = processes
    overflowing = {name for name in vllm_probes.PROBES if name.endswith("-offset-overflows")}
    assert len(overflowing) > 3
    assert {"wild", *overflowing} <= last
    assert "calm" in set().union(*others)
    assert last.isdisjoint(set().union(*others))
