"""An engine that does not keep the protocol is told so in one line, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loragate.engine.answers import Breach, called, checked
from loragate.engine.order import Call
from loragate.engine.process import EngineBreach, EngineError, EngineNotStarted, EngineProcess
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.engine_case import Logprobs

from .small_order import ORDER

ENGINES = """
from loragate.engine.requests import Completion, EngineCounts

NUMBER = 3


class Right:
    def __init__(self, order):
        pass

    def load(self, name, folder):
        return (name for name in "nothing that could be pickled")

    def unload(self, name):
        pass

    def generate(self, requests):
        return [Completion(request.prompt) for request in requests]

    def counts(self):
        return EngineCounts(0, 0, None, 1)

    def close(self):
        pass


class Lazy(Right):
    def generate(self, requests):
        return (Completion(request.prompt) for request in requests)


class Tensors(Right):
    def generate(self, requests):
        import torch

        return [Completion(tuple(torch.tensor(request.prompt))) for request in requests]


class Uncounted(Right):
    counts = None


class Raising(Right):
    @property
    def generate(self):
        raise KeyError("no model")


class Loading(Right):
    def load(self, folder):
        pass


def nothing(order):
    return None


def without_order():
    return Right(None)
"""
METHODS = "load, unload, generate, counts, close"
REQUESTS = [Request((1, 2), None, 2)]
Start = Callable[[str], EngineProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    (tmp_path / "engines_of_a_test.py").write_text(ENGINES)
    (tmp_path / "unready.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def started(target: str) -> EngineProcess:
        return EngineProcess(target, ORDER, deadline_s=240.0, log=tmp_path / "engine.log")

    return started


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "engines_of_a_test:Rihgt",
            "engine_target(case) returned 'engines_of_a_test:Rihgt', but engines_of_a_test has no "
            "'Rihgt'; did you mean 'Right'?",
        ),
        (
            "not_there:start",
            "engine_target(case) returned 'not_there:start', but there is no module 'not_there' "
            "in the current folder or in PYTHONPATH",
        ),
        (
            "engines_of_a_test:NUMBER",
            "engine_target(case) returned 'engines_of_a_test:NUMBER', which is an int; expected a "
            "function or a class",
        ),
        (
            "engines_of_a_test:nothing",
            f"engines_of_a_test:nothing returned None; expected an engine with the methods "
            f"{METHODS}",
        ),
        (
            "engines_of_a_test:without_order",
            "engines_of_a_test:without_order() is called with (EngineOrder): too many positional "
            "arguments",
        ),
        (
            "engines_of_a_test:Uncounted",
            "engines_of_a_test:Uncounted returned an object of type engines_of_a_test.Uncounted "
            f"without counts; expected an engine with the methods {METHODS}",
        ),
    ],
)
def test_what_is_no_engine_breaks_the_protocol_at_the_start(
    start: Start, target: str, message: str
) -> None:
    with pytest.raises(EngineBreach) as caught:
        start(target)
    assert str(caught.value) == message


def test_a_module_that_misses_a_package_of_its_own_is_no_engine_that_started(start: Start) -> None:
    with pytest.raises(EngineNotStarted, match="No module named 'a_package_that_is_not_there'"):
        start("unready:start")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lazy", "generate returned a generator; expected a list of Completions"),
        (
            "Tensors",
            "generate returned a Completion whose tokens hold an object of type torch.Tensor; "
            "expected Completions of loragate.engine.requests with a tuple of int each",
        ),
    ],
)
def test_an_answer_that_cannot_be_sent_breaks_the_protocol(
    start: Start, name: str, message: str
) -> None:
    with closing(start(f"engines_of_a_test:{name}")) as engine:
        with pytest.raises(EngineBreach) as caught:
            engine.generate(REQUESTS)
        assert str(caught.value) == message
        # the process answers as before
        assert engine.counts() == EngineCounts(0, 0, None, 1)


def test_a_method_that_takes_other_arguments_breaks_the_protocol(start: Start) -> None:
    message = r"^load\(folder\) is called with \(str, \w+Path\): too many positional arguments$"
    engine = start("engines_of_a_test:Loading")
    with closing(engine), pytest.raises(EngineBreach, match=message):
        engine.load("one", Path("folder"))


def test_what_an_engine_raises_is_no_breach_and_what_load_returns_is_not_sent(start: Start) -> None:
    with closing(start("engines_of_a_test:Right")) as engine:
        engine.load("one", Path("folder"))
        assert engine.generate(REQUESTS) == [Completion((1, 2))]
    with pytest.raises(EngineNotStarted, match=r"the start raised KeyError: 'no model'"):
        start("engines_of_a_test:Raising")


class OtherCompletion:
    tokens = (1, 2)


@pytest.mark.parametrize(
    ("method", "found", "message"),
    [
        ("generate", [], "generate returned a list of 0; expected 1, one for each request"),
        ("generate", None, "generate returned None; expected a list"),
        ("generate", [(1, 2)], "generate returned a list that holds a tuple; expected Completions"),
        ("generate", [OtherCompletion()], "holds an object of type .*OtherCompletion; expected"),
        ("generate", [Completion([1, 2])], "a Completion whose tokens are a list; expected"),  # type: ignore[arg-type]
        ("generate", [Completion((1, 2.0))], "a Completion whose tokens hold a float; expected"),  # type: ignore[arg-type]
        ("generate", [Completion((1, 2), [0.0, 0.0])], "whose logprobs are a list; expected"),  # type: ignore[arg-type]
        ("generate", [Completion((1, 2), ("0", 0.0))], "that holds something else than numbers"),  # type: ignore[arg-type]
        ("generate", [Completion((1, 2), (0.0,))], "a Completion with 1 logprobs for 2 tokens"),
        ("counts", {}, "counts returned a dict; expected an EngineCounts"),
        ("counts", EngineCounts(0, 1, -1, 3), "whose graphs_replayed is -1; expected 0 or more"),
        ("counts", EngineCounts(0, 1, 2.0, 3), "whose graphs_replayed is a float; expected an int"),  # type: ignore[arg-type]
        ("trace", [1], "trace returned a list; expected a mapping"),
        ("trace", {"lm_head": [1.0]}, "trace returned a str with a list in it; expected names"),
    ],
)
def test_an_answer_of_another_form_is_named_with_the_one_that_is_expected(
    method: str, found: object, message: str
) -> None:
    with pytest.raises(Breach, match=message):
        checked(Call(method, (REQUESTS,)), found, ORDER.case)


def test_probabilities_must_be_given_where_a_case_asks_for_them() -> None:
    asks, call = replace(ORDER.case, logprobs=Logprobs.ON), Call("generate", (REQUESTS,))
    without, with_them = [Completion((1, 2))], [Completion((1, 2), (-0.5, -2.0))]
    for case, found in ((ORDER.case, without), (ORDER.case, with_them), (asks, with_them)):
        (sent,) = checked(call, found, case)  # type: ignore[misc]
        assert sent.logprobs == found[0].logprobs
    message = r"whose logprobs are None; expected a tuple of float \(logprobs: on\)"
    with pytest.raises(Breach, match=message):
        checked(call, without, asks)


def test_answers_are_sent_as_plain_numbers() -> None:
    numbers = torch.arange(3, dtype=torch.int32).numpy()
    case, values = ORDER.case, tuple(numbers.astype("float32"))
    given = [Completion(tuple(numbers), values)]
    (sent,) = checked(Call("generate", (REQUESTS,)), given, case)  # type: ignore[misc]
    assert [type(token) for token in sent.tokens] == [int, int, int]
    assert [type(value) for value in sent.logprobs] == [float, float, float]
    counts = checked(Call("counts", ()), EngineCounts(None, numbers[1], None, 2), case)
    assert counts == EngineCounts(None, 1, None, 2)
    assert type(counts.drafts_rejected) is int  # type: ignore[attr-defined]
    # those with a gradient, too
    shown = checked(Call("trace", ()), {"head": torch.ones(2, requires_grad=True)}, case)
    assert shown["head"].tolist() == [1.0, 1.0]  # type: ignore[index]


def test_a_function_that_wraps_another_one_is_called_as_it_is_itself() -> None:
    def wrapper(*arguments: object) -> object:
        return arguments

    wrapper.__wrapped__ = lambda: None  # type: ignore[attr-defined]
    assert called("load", wrapper, "one", 2) == ("one", 2)
    # classes of extensions have no signature
    assert called("start", type, 3) is int


def test_a_breach_is_an_error_of_the_engine() -> None:
    assert issubclass(EngineBreach, EngineError)
    assert not issubclass(EngineBreach, EngineNotStarted)
