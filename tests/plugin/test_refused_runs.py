"""What no run can begin with is one line at the start of every command, and touches no report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loragate.core.errors import CommandError
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode, Verdict
from loragate.run import preflight

MATRICES = Path(__file__).parent / "misbehaving"
CASE = (
    "dense_delta.dtype-fp32.exec-eager.in-32.layout-contiguous.mix-ragged.rank-8"
    ".ranks-mixed.slices-16.slots-4.tokens-21"
)
# below a file there is no folder, for root as for everybody else
NOWHERE = "/dev/null/nowhere"


@pytest.fixture
def run(tmp_path, subject_environment, run_python):
    """Runs a command on four small cases of a subject; its report, if any, goes to `tmp_path`."""

    def command_of(name: str, subject: str) -> tuple[str, ...]:
        matrix, report = MATRICES / "four_good.yaml", tmp_path / "report"
        options = (f"--matrix={matrix}", f"--subject={subject}")
        return {
            "gate": ("loragate", "gate", *options, f"--report={report}"),
            "plan": ("loragate", "plan", *options),
            "replay": ("loragate", "replay", f"{subject}.{CASE}", f"--matrix={matrix}"),
            "pytest": (
                *("pytest", "cases", "-p", "no:cacheprovider", f"--loragate-report={report}"),
                *(f"--loragate-subject={subject}", f"--loragate-matrix={matrix}"),
            ),
        }[name]

    # caches are looked for in the home folder alone
    caches = ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR")
    home = {name: value for name, value in subject_environment.items() if name not in caches}

    def call(name: str, subject: str = "torch", **changes: str) -> tuple[int, str]:
        done = run_python("-m", *command_of(name, subject), env={**home, **changes})
        assert not (tmp_path / "report").exists() or not done.returncode
        return done.returncode, done.stdout

    return call


COMMANDS = ("gate", "plan", "replay", "pytest")


@pytest.mark.drill(
    tried="No GPU, and Triton's interpreter switched off",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="the earlier report, untouched; one line names the variable",
)
@pytest.mark.parametrize(
    ("command", "value"), [("gate", "0"), ("plan", "maybe"), ("replay", "false"), ("pytest", "")]
)
def test_where_kernels_can_run_nowhere_every_command_says_so(run, drill, command, value):
    code, output = run(command, TRITON_INTERPRET=value)
    drill(code, output)
    assert (
        "kernels can run nowhere: there is no GPU, and "
        f"TRITON_INTERPRET={value!r} switches Triton's interpreter off" in output
    )


@pytest.mark.drill(
    tried="TRITON_INTERPRET=true in place of 1",
    exit_code=ExitCode.OK,
    kept="the run: kernels run in the repaired interpreter",
)
def test_every_spelling_that_triton_takes_for_on_runs_the_repaired_interpreter(
    run_session, tmp_path, drill
):
    # dot products of bf16 are wrong without the repair
    done = run_session(
        tmp_path / "report",
        matrix="bf16.yaml",
        subject="lorakernels",
        TRITON_INTERPRET="true",
    )
    drill(done.exit_code, done.output)
    assert [end.verdict for end in done.finished] == [Verdict.PASS]


@pytest.mark.drill(
    tried="A home folder that cannot be written, where kernels are compiled",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="the earlier report, untouched; one line names the folder, the reason and the variable",
)
def test_a_cache_that_triton_cannot_write_is_refused_once(run, drill):
    # the leg that compiles needs no GPU
    code, output = run("gate", "lorakernels", HOME=NOWHERE)
    drill(code, output)
    assert re.search(
        rf"gate: Triton cannot write its cache in {NOWHERE}/\.triton/cache: Not a directory; "
        "set TRITON_CACHE_DIR to a folder that can be written",
        output,
    )


@pytest.mark.drill(
    tried="A cache of torch that cannot be written",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="the earlier report, untouched; one line names the folder, the reason and the variable",
)
def test_a_cache_that_torch_cannot_write_is_refused_once(run, drill):
    code, output = run("pytest", "lorakernels", TORCHINDUCTOR_CACHE_DIR=NOWHERE)
    drill(code, output)
    assert f"torch cannot write its cache in {NOWHERE}: Not a directory" in output


def test_a_run_that_compiles_nothing_needs_no_home_folder(run):
    code, output = run("pytest", "torch", HOME=NOWHERE, TORCHINDUCTOR_CACHE_DIR=NOWHERE)
    assert code == ExitCode.OK, output


@pytest.fixture
def check(monkeypatch):
    """Tries the caches of a subject on a machine where Triton cannot write."""
    monkeypatch.setenv("TRITON_CACHE_DIR", NOWHERE)
    preflight.check_caches.cache_clear()

    def call(subject: str, device: str, **options: bool) -> None:
        preflight.check_caches(subject, Machine(device, "test", None, 1, 0), **options)

    return call


@pytest.mark.parametrize("subject", ["lorakernels", "mine:Subject"])
def test_the_cache_of_triton_is_tried_on_a_gpu_unless_the_subject_has_no_kernels(check, subject):
    with pytest.raises(CommandError, match="Triton cannot write its cache") as caught:
        check(subject, "cuda")
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE
    check("torch", "cuda")


def test_without_a_gpu_it_is_tried_for_kernels_that_the_run_compiles_for_others(check):
    check("lorakernels", "cpu")
    with pytest.raises(CommandError, match="Triton cannot write its cache"):
        check("lorakernels", "cpu", cross_compiled=True)


def test_a_machine_without_a_temporary_folder_is_told_so(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(preflight.tempfile, "gettempdir", none)
    with pytest.raises(
        CommandError, match=r"found in \['/tmp'\]; set TMPDIR to a folder"
    ) as caught:
        preflight.check_temporary_folder()
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE


SUBJECTS = {
    "gate": (
        "raises_at_import:Subject",
        "importing raises_at_import raised RuntimeError: no driver for this card (",
    ),
    "plan": (
        "protocol_breaking_subject:RaisesWhenAsked",
        "capabilities(machine) raised LookupError: no table for this device (",
    ),
    "replay": (
        "protocol_breaking_subject:raise_at",
        "raise_at needs arguments (method, tokens) and is called without any",
    ),
    "pytest": (
        "exits_at_import:Subject",
        "importing exits_at_import raised SystemExit: 0 (",
    ),
}


@pytest.mark.drill(
    tried="A subject that raises or exits when it is imported or asked, or is no subject",
    exit_code=ExitCode.USAGE,
    kept="the earlier report, untouched; one line names the subject, the error, its file and line",
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_subject_that_cannot_be_used_is_refused_once(run, drill, command):
    subject, message = SUBJECTS[command]
    code, output = run(command, subject)
    drill(code, output)
    assert output.count(f"subject {subject!r}: {message}") == 1


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_a_subject_that_ends_the_process_which_plans_is_reported_in_a_line(run, code):
    exit_code, output = run("gate", "leaves_at_import:Subject", LEAVES_WITH=str(code))
    assert exit_code == ExitCode.INFRASTRUCTURE
    assert output == (
        "loragate gate: the run cannot be planned on this machine: "
        f"the process that plans it ended with exit code {code} and no plan\n"
    )
