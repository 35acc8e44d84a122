"""An error is charged to whoever caused it: the subject, the harness, or who called the command."""

from __future__ import annotations

import re

import pytest

from loragate.core.verdict import ExitCode, Failure, Verdict

BREAKING = "protocol_breaking_subject:Breaking"
OUT = "expected of shape [{}, 16], torch.float32 on cpu, like out"


@pytest.fixture(scope="module")
def broken(run_once, run_session):
    """A session of a subject that breaks every promise of the protocol."""
    return run_once(
        "protocol",
        lambda report: run_session(report, matrix="protocol.yaml", subject=BREAKING),
    )


@pytest.fixture(scope="module")
def planted(run_once, run_session):
    """A session with a sound subject and errors that are planted in the harness."""

    def make(report):
        plugin = ("-p", "harness_errors", "-n", "0")
        return run_session(report, *plugin, matrix="four_good.yaml")

    return run_once("harness-errors", make)


@pytest.mark.drill(
    tried="A subject whose answers are not what the protocol promises",
    exit_code=ExitCode.WRONG,
    kept="every page; one line a case says what was called, what came back, what is expected",
)
def test_a_case_with_a_broken_promise_fails_and_all_others_are_judged(broken, drill):
    drill(broken.exit_code, broken.output)
    assert "13 failed, 1 passed" in broken.output
    assert broken.of_tokens(21).verdict is Verdict.PASS
    assert "broken protocol" in (broken.report / "index.html").read_text()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (31, "apply returned None; expected a tensor of shape [31, 16], torch.float32 on cpu"),
        (32, "apply returned an object of type list; expected a tensor of shape [32, 16], "),
        (33, f"apply returned a tensor of shape [33, 15], torch.float32 on cpu; {OUT.format(33)}"),
        (34, f"apply returned a tensor of shape [34, 16], torch.float64 on cpu; {OUT.format(34)}"),
        (35, f"apply returned a tensor of shape [35, 16], torch.float32 on meta; {OUT.format(35)}"),
        (36, "apply returned a tensor in other memory; expected out itself, which dense_delta "),
        (41, "open(case, machine, base) returned None without load, unload, prepare, apply; "),
        (42, "open(case, machine, base) returned an object of type protocol_breaking_subject.Half"),
    ],
)
def test_an_answer_that_the_protocol_does_not_allow_is_named_in_one_line(broken, tokens, message):
    for judgement in broken.of_tokens(tokens).judgements:
        assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.BROKEN_PROTOCOL)
        assert judgement.message.startswith(message)
        assert "\n" not in judgement.message


@pytest.mark.parametrize(
    ("tokens", "raised"),
    [
        (51, "AssertionError: slots are sorted"),
        (52, "AssertionError: slots are sorted"),
        (53, "AssertionError: slots are sorted"),
        (54, "AssertionError: slots are sorted"),
        (55, "SystemExit: 0"),
    ],
)
def test_what_any_method_of_the_subject_raises_is_its_failure(broken, tokens, raised):
    # only a sequence of steps empties a slot
    judgement = broken.of_tokens(tokens).judgements[-1]
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.EXCEPTION)
    assert judgement.message.startswith(raised)
    assert "protocol_breaking_subject.py" in judgement.message


@pytest.mark.drill(
    tried="An assertion that fails inside an oracle",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="every page; the case is an infrastructure failure that names the module and line",
)
def test_an_error_of_an_oracle_is_charged_to_the_harness(planted, drill):
    drill(planted.exit_code, planted.output)
    (judgement,) = planted.of_tokens(22).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.INFRA, Failure.HARNESS)
    place = r"error of the harness in loragate\.oracles\.numeric\.reference, line \d+: "
    assert re.match(place + "AssertionError: planted in the harness", judgement.message)
    assert [planted.of_tokens(t).verdict for t in (21, 24)] == [Verdict.PASS] * 2


@pytest.mark.drill(
    tried="Input generation that fails for a legal case",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="every page; the case is an infrastructure failure that names the module and line",
)
def test_an_error_of_input_generation_is_charged_to_the_harness(planted, drill):
    drill(planted.exit_code, planted.output)
    (judgement,) = planted.of_tokens(23).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.INFRA, Failure.HARNESS)
    assert "error of the harness in loragate.inputs.pool, line " in judgement.message


@pytest.mark.parametrize(
    ("page", "kind"), [("index.html", "harness error"), ("junit.xml", 'type="harness_error"')]
)
def test_the_reports_show_an_error_of_the_harness(planted, page, kind):
    text = (planted.report / page).read_text()
    assert kind in text
    assert "error of the harness in loragate.inputs.pool" in text
