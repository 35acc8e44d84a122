from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode
from loragate.findings import probe_runner
from loragate.findings.ledger import Observation, Seen
from loragate.findings.probe_runner import run_probes

pytestmark = pytest.mark.usefixtures("preloaded")

# a process that behaves as the names of its probes say
CHILD = """
import json, os, signal, sys, time
record, names = sys.argv[1], sys.argv[2:]
def write(**fact):
    with open(record, "a") as file:
        file.write(json.dumps(fact) + "\\n")
if "refused" in names:
    write(refused="vLLM is not installed")
    sys.exit(0)
if "meets" in names or "met" in names:
    # each waits for the other one
    own, other = ("meets", "met") if "meets" in names else ("met", "meets")
    folder = os.path.dirname(sys.argv[0])
    open(os.path.join(folder, own), "w").close()
    while not os.path.exists(os.path.join(folder, other)):
        time.sleep(0.01)
if "dies-first" in names:
    sys.exit("no module named vllm")
if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") != os.devnull:
    sys.exit("whoever shares the GPU would lose it, too")
write(version="0.26.0")
folder = os.path.dirname(sys.argv[0])
with open(os.path.join(folder, "imported"), "a") as file:
    file.write(" ".join(names) + "\\n")
if not sys.stdin.readline():
    sys.exit("nobody is there")
for name in names:
    write(began=name)
    if name == "calm":
        # until the other process has imported the package as well
        while len(open(os.path.join(folder, "imported")).readlines()) < 2:
            time.sleep(0.01)
    with open(os.path.join(folder, "order"), "a") as file:
        file.write(name + "\\n")
    if name == "hangs":
        time.sleep(600)
    if name == "killed":
        print("Segmentation fault", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    write(probe=name, seen="broken" if name == "loses-device" else "reproduced", text=name)
    if name == "loses-device":
        sys.exit(1)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The probes of each process that is started."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    calls: list[tuple[str, ...]] = []
    command: Callable[..., tuple[str, ...]] = probe_runner.python_module

    def start(module: str, record: str, *names: str) -> tuple[str, ...]:
        calls.append(names)
        return (command(module)[0], str(script), record, *names)

    monkeypatch.setattr(probe_runner, "python_module", start)
    return calls


def test_probes_of_a_group_share_a_process_and_groups_do_not(
    started: list[tuple[str, ...]],
) -> None:
    version, observed = run_probes([["a", "b"], ["wild"]])
    assert sorted(started) == [("a", "b"), ("wild",)]
    assert version == "0.26.0"
    assert observed == {name: Observation(Seen.REPRODUCED, name) for name in ("a", "b", "wild")}


def test_a_probe_that_hangs_or_dies_or_loses_the_device_costs_only_its_own_line(
    started: list[tuple[str, ...]],
) -> None:
    names = ["a", "hangs", "b", "killed", "c", "loses-device", "d"]
    _, observed = run_probes([names], patience_s=2)
    assert list(observed) == names
    assert started == [tuple(names), tuple(names[2:]), tuple(names[4:]), ("d",)]
    assert observed["hangs"] == Observation(Seen.BROKEN, "gave no answer for 2 s and was ended")
    ended = "its process was ended by SIGSEGV: Segmentation fault"
    assert observed["killed"] == Observation(Seen.BROKEN, ended)
    good = {name for name, one in observed.items() if one.seen is Seen.REPRODUCED}
    assert good == {"a", "b", "c", "d"}


def test_groups_run_side_by_side(started: list[tuple[str, ...]]) -> None:
    _, observed = run_probes([["meets"], ["met"]], patience_s=20)
    assert {name: one.seen for name, one in observed.items()} == {
        "meets": Seen.REPRODUCED,
        "met": Seen.REPRODUCED,
    }


def test_the_last_group_imports_beside_the_others_and_begins_behind_them(
    started: list[tuple[str, ...]], tmp_path: Path
) -> None:
    _, observed = run_probes([["calm", "killed", "b"]], last=["wild", "tame"], patience_s=20)
    assert (tmp_path / "order").read_text().split() == ["calm", "killed", "b", "wild", "tame"]
    assert {name for name, one in observed.items() if one.seen is Seen.REPRODUCED} == {
        *("calm", "b", "wild", "tame")
    }


def test_the_last_group_waits_until_it_may_begin(
    started: list[tuple[str, ...]], tmp_path: Path
) -> None:
    order, asked = tmp_path / "order", list[bool]()

    def may_be_last() -> bool:
        # nobody is asked before the others have ended
        asked.append("b" in order.read_text().split())
        return len(asked) > 3

    _, observed = run_probes([["calm", "b"]], last=["wild"], may_be_last=may_be_last, patience_s=20)
    assert (order.read_text().split(), asked) == (["calm", "b", "wild"], [True] * 4)
    assert observed["wild"].seen is Seen.REPRODUCED


def test_a_last_group_that_cannot_run_ends_the_others(started: list[tuple[str, ...]]) -> None:
    with pytest.raises(CommandError, match=r"^vLLM is not installed$"):
        run_probes([["hangs"]], last=["refused"], patience_s=60)


@pytest.mark.parametrize("first", [["refused"], ["hangs", "b"]])
def test_a_group_that_cannot_run_ends_the_others_at_once(
    first: list[str], started: list[tuple[str, ...]]
) -> None:
    groups = sorted([["refused"], ["hangs", "b"]], key=lambda group: group != first)
    with pytest.raises(CommandError, match=r"^vLLM is not installed$"):
        run_probes(groups, patience_s=5)
    # what is left of a group is not tried any more
    assert sorted(started) == [("hangs", "b"), ("refused",)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refused", "vLLM is not installed"),
        (
            "dies-first",
            "its process ended with exit code 1: no module named vllm",
        ),
    ],
)
def test_where_no_probe_can_run_the_command_ends_and_says_why(
    started: list[tuple[str, ...]], name: str, message: str
) -> None:
    with pytest.raises(CommandError) as error:
        run_probes([[name]])
    assert error.value.exit_code is ExitCode.INFRASTRUCTURE
    assert str(error.value).endswith(message)
