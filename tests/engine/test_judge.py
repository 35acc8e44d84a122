"""The judge on planted mistakes: each is found at its first token and is named."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loragate.core.sequential import Decision
from loragate.engine.drafts import drafted_word, write_draft
from loragate.engine.folders import write_adapter, write_model
from loragate.engine.judge import Judge
from loragate.engine.language import PLACES, Language, Prompt, Speaker, draw_prompt, draw_speakers
from loragate.engine.logprobs import distance
from loragate.engine.reference import Reference
from loragate.engine.report import Report
from loragate.engine.requests import Completion, Request

DENSE = Language(cycles=4)
HYBRID = Language(cycles=8, experts=4, linear_layers=(0,))
WRONG, COUNT = 3, 2 * PLACES


class Bench:
    """A model, its draft model and two adapters; a request for the base model and one for each."""

    def __init__(self, root: Path, language: Language) -> None:
        self.language, self.root = language, root
        self.speakers = draw_speakers(language, 2, Random(5))
        self.everyone = [language.base(), *self.speakers]
        write_model(root / "model", language, dtype=torch.bfloat16)
        write_draft(root / "draft", language, wrong=WRONG, dtype=torch.bfloat16)
        self.adapters = {speaker.name: root / speaker.name for speaker in self.speakers}
        for speaker in self.speakers:
            write_adapter(root / speaker.name, language, speaker, rank=8, alpha=12)
        self.judge = Judge(root / "model", self.adapters, draft=root / "draft")
        random = Random(3)
        self.prompts = [draw_prompt(language, self.everyone, random) for _ in self.everyone]
        self.requests = [
            Request(tuple(language.tokens(prompt)), name, COUNT)
            for prompt, name in zip(self.prompts, (None, *self.adapters), strict=True)
        ]

    def says(self, prompt: Prompt, speaker: Speaker) -> Completion:
        return Completion(tuple(self.language.words_after(prompt, speaker, COUNT)))

    def right(self) -> list[Completion]:
        return [self.says(p, s) for p, s in zip(self.prompts, self.everyone, strict=True)]

    def judged(self, changed: Mapping[int, Completion]) -> Report:
        """A batch in which these completions replace the right ones."""
        served = [changed.get(n, right) for n, right in enumerate(self.right())]
        return self.judge.judge(self.requests, served)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("hybrid"), HYBRID)


def test_a_reference_runs_in_one_thread_and_leaves_those_of_its_caller(dense: Bench) -> None:
    reference = Reference(dense.root / "model")
    seen: list[int] = []
    reference.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        reference.logits([0, 1])
        with pytest.raises(IndexError):
            reference.logits([reference.num_tokens])
        assert (seen, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(before)


def test_right_tokens_pass_and_the_noise_is_far_below_a_wrong_word(dense: Bench) -> None:
    report = dense.judged({})
    assert report.decision is Decision.PASS
    assert (report.tokens, report.near_ties, report.defects) == (3 * COUNT, 0, ())
    assert 0 < report.noise < 6
    assert (report.ratio.matches, report.ratio.requests) == (3, 3)
    # three requests are no evidence for a rate
    assert report.texts is Decision.UNDECIDED
    assert report.lines()[0].startswith("pass: 78 tokens of 3 requests, 0 requests with defects")


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.bfloat16, 0.625), (torch.float16, 0.625 / 8), (torch.float32, 0.01)],
)
def test_the_noise_is_measured_in_the_dtype_of_the_engine_and_has_a_limit(
    dense: Bench, dtype: torch.dtype, most: float
) -> None:
    judge = Judge(dense.root / "model", dense.adapters, dtype=dtype)
    report = judge.judge(dense.requests, dense.right())
    assert report.decision is Decision.PASS
    assert report.noise == min(report.measured, most)
    # sums of an fp32 engine in another order, far below the limit; of the others far above it
    assert (report.measured < most) == (dtype is torch.float32)


def test_what_is_a_near_tie_in_bf16_is_a_defect_in_fp32(dense: Bench, tmp_path: Path) -> None:
    """Two words that the model tells apart by 0.3."""
    request, (word, *_) = dense.requests[0], dense.right()[0].tokens
    cycle, place = dense.language.place_of(word)
    other = dense.language.word(cycle, place + 1)
    logit = float(Reference(dense.root / "model").logits(request.prompt)[-1, word])
    model = shutil.copytree(dense.root / "model", tmp_path / "model")
    weights = {n: w.double() for n, w in load_file(model / "model.safetensors").items()}
    head = weights["lm_head.weight"]
    head[other] = head[word] * (1 - 0.3 / logit)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for dtype, decision in ((torch.bfloat16, Decision.UNDECIDED), (torch.float32, Decision.FAIL)):
        judge = Judge(model, {}, dtype=dtype)
        found = judge.judge([replace(request, new_tokens=1)], [Completion((other,))])
        assert found.decision is decision


@pytest.mark.parametrize(("number", "said_by"), [(2, "adapter-1"), (1, "base"), (0, "adapter-2")])
def test_the_tokens_of_another_adapter_name_it(dense: Bench, number: int, said_by: str) -> None:
    (other,) = [speaker for speaker in dense.everyone if speaker.name == said_by]
    report = dense.judged({number: dense.says(dense.prompts[number], other)})
    (found,) = report.defects
    assert report.decision is Decision.FAIL
    assert (found.request, found.adapter) == (number, dense.requests[number].adapter)
    assert (found.position, found.said_by, found.wrong_tokens) == (0, (said_by,), COUNT)
    assert found.gap is not None
    assert found.gap > report.noise
    assert found.answer_to is None
    assert report.said_by(found.adapter) == (said_by,)
    assert f"said by {said_by}" in report.lines()[2]


def test_a_first_wrong_token_in_the_middle_is_where_the_adapter_changes(dense: Bench) -> None:
    """A step of a graph that was captured without adapters, and right steps around it."""
    own = list(dense.right()[1].tokens)
    base = dense.language.next_word(dense.prompts[1], own[6], dense.language.base())
    rest = dense.language.words_after(
        replace(dense.prompts[1], word=base), dense.everyone[1], COUNT - 8
    )
    (found,) = dense.judged({1: Completion((*own[:7], base, *rest))}).defects
    assert (found.position, found.token, found.wanted) == (7, base, own[7])
    assert (found.said_by, found.wrong_tokens) == (("base",), 1)


def logprobs_of(bench: Bench, number: int, folder: Path | None) -> tuple[float, ...]:
    """Of the right answer to a request, as the model with another adapter has them."""
    request, answer = bench.requests[number], bench.right()[number].tokens
    judged = Reference(bench.root / "model", folder).judge(request.prompt, answer)
    return tuple(token.logprob for token in judged)


def with_logprobs(bench: Bench, number: int, values: Sequence[float]) -> Report:
    """A batch in which the right answer to a request has these."""
    return bench.judged({number: replace(bench.right()[number], logprobs=tuple(values))})


@pytest.mark.parametrize("number", [0, 1, 2])
def test_probabilities_of_the_own_adapter_pass_up_to_what_rounding_changes(
    dense: Bench, number: int
) -> None:
    right = logprobs_of(dense, number, dense.adapters.get(str(dense.requests[number].adapter)))
    report = with_logprobs(dense, number, right)
    assert (report.decision, report.wrong_logprobs) == (Decision.PASS, ())
    # its words are all but certain: nothing else moves them
    floor = 1e-3
    assert 0.1 < report.log_odds_noise <= 1.875
    for share, decision in ((0.9, Decision.PASS), (1.3, Decision.FAIL), (-2.5, Decision.FAIL)):
        changed = [*right[:-1], right[-1] + share * floor]
        assert with_logprobs(dense, number, changed).decision is decision


def test_probabilities_of_another_adapter_name_it_and_their_first_token(dense: Bench) -> None:
    right = logprobs_of(dense, 2, dense.adapters["adapter-2"])
    for said_by, folder in {"base": None, "adapter-1": dense.adapters["adapter-1"]}.items():
        values = [*right[:3], *logprobs_of(dense, 2, folder)[3:]]
        report = with_logprobs(dense, 2, values)
        (found,) = report.wrong_logprobs
        assert (found.request, found.adapter, found.position) == (2, "adapter-2", 3)
        assert (found.given, found.wanted) == (values[3], pytest.approx(right[3]))
        assert (found.said_by, found.wrong_tokens) == ((said_by,), COUNT - 3)
        assert (report.decision, report.defects) == (Decision.FAIL, ())
        assert f"has the log-probability {found.given:.4g}, not" in report.lines()[2]
        assert f"said by {said_by}" in report.lines()[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.0])
def test_a_probability_that_is_no_number_or_above_1_is_wrong(dense: Bench, value: float) -> None:
    right = logprobs_of(dense, 1, dense.adapters["adapter-1"])
    (found,) = with_logprobs(dense, 1, [*right[:-1], value]).wrong_logprobs
    assert (found.position, found.said_by) == (COUNT - 1, ())
    # whichever of the differences is looked at first
    off = 1.0 if value == 1.0 else float("inf")
    assert found.worst == pytest.approx(off, rel=0.2)


def test_probabilities_of_wrong_tokens_are_not_judged_beside_them(dense: Bench) -> None:
    wrong = dense.says(dense.prompts[1], dense.everyone[2])
    report = dense.judged({1: replace(wrong, logprobs=(0.0,) * COUNT)})
    assert [found.request for found in report.problems] == [1]
    assert report.wrong_logprobs == ()


@pytest.mark.parametrize(
    ("length", "position", "token"),
    # behind the end, and before it
    [(7, 5, True), (4, 4, False)],
)
def test_an_answer_ends_with_the_token_that_ends_it_and_neither_before_nor_behind(
    dense: Bench, length: int, position: int, token: bool
) -> None:
    request, right = dense.requests[1], dense.right()[1].tokens
    stop = (right[4], dense.language.tokens(dense.prompts[1])[0])
    assert right.index(stop[0]) == 4
    request = replace(request, stop=stop)
    passed = dense.judge.judge([request], [Completion(right[:5])])
    assert (passed.decision, passed.matches) == (Decision.PASS, 1)
    failed = dense.judge.judge([request], [Completion(right[:length])])
    (found,) = failed.defects
    assert (found.position, found.token is not None) == (position, token)
    assert (", behind the end of the answer" in found.line()) == token
    assert (failed.decision, failed.matches) == (Decision.FAIL, 0)


def test_answers_are_as_far_apart_as_their_largest_difference_of_probabilities() -> None:
    one, nothing = Completion((1, 2), (-1.0, -2.0)), float("nan")
    assert distance(one, Completion((1, 2), (-1.25, -1.5))) == 0.5
    assert distance(one, Completion((1, 3), (-1.0, -2.0))) == float("inf")
    # whichever place is looked at first
    for values in ((nothing, -2.0), (-1.0, nothing)):
        assert distance(Completion((1, 2), values), one) == float("inf")
    assert distance(Completion((1, 2)), Completion((1, 2))) == 0


def test_rows_in_another_order_are_answers_to_other_requests(dense: Bench) -> None:
    right = dense.right()
    report = dense.judged({0: right[1], 1: right[2], 2: right[0]})
    assert [found.answer_to for found in report.defects] == [1, 2, 0]
    assert {found.position for found in report.defects} == {0}


def test_an_unverified_draft_is_named(dense: Bench) -> None:
    """Of two drafts the engine takes one more than it has verified."""
    language, prompt, speaker = dense.language, dense.prompts[2], dense.everyone[2]
    words = [prompt.word, *language.words_after(prompt, speaker, 1)]
    unverified = []
    while len(words) <= COUNT:
        draft = drafted_word(language, words[-2], words[-1], WRONG)
        if draft != language.next_word(prompt, words[-1], speaker):
            unverified.append(len(words) - 1)
        words.append(draft)
        words.append(language.next_word(prompt, draft, speaker))
    (found,) = dense.judged({2: Completion(tuple(words[1 : COUNT + 1]))}).defects
    assert unverified
    assert (found.position, found.wrong_tokens) == (unverified[0], len(unverified))
    assert found.said_by == ("draft",)


def test_who_says_all_wrong_tokens_is_named_before_who_says_the_first(dense: Bench) -> None:
    """The adapter changes within a request, at a word that an unverified draft would be, too."""
    language, (_, own, other) = dense.language, dense.everyone
    prompt, place = next(
        (prompt, place)
        for seed in range(1000)
        for prompt in [draw_prompt(language, dense.everyone, Random(seed))]
        for words in [language.words_after(prompt, own, 8)]
        for place in range(2, 8)
        if drafted_word(language, *words[place - 2 : place], WRONG)
        == language.next_word(prompt, words[place - 1], other)
    )
    words = language.words_after(prompt, own, place)
    rest = language.words_after(replace(prompt, word=words[-1]), other, COUNT - place)
    request = replace(dense.requests[1], prompt=tuple(language.tokens(prompt)))
    (found,) = dense.judge.judge([request], [Completion((*words, *rest))]).defects
    assert (found.position, found.said_by) == (place, ("adapter-2",))
    # then the base model takes over: nobody says all of it
    third = language.words_after(replace(prompt, word=rest[0]), language.base(), COUNT - place - 1)
    served = Completion((*words, rest[0], *third))
    (found,) = dense.judge.judge([request], [served]).defects
    assert (found.position, found.said_by) == (place, ("adapter-2", "draft"))


def test_a_first_token_is_no_draft(dense: Bench) -> None:
    draft = Reference(dense.root / "draft")
    for number, (request, right) in enumerate(zip(dense.requests, dense.right(), strict=True)):
        guess = draft.next_tokens(request.prompt, [0])[0]
        if guess != right.tokens[0]:
            (found,) = dense.judged({number: Completion((guess, *right.tokens[1:]))}).defects
            assert found.position == 0
            assert "draft" not in found.said_by


def without(folder: Path, out: Path, module: str) -> Path:
    """An adapter without its factors of a module."""
    out.mkdir(exist_ok=True)
    factors = load_file(folder / "adapter_model.safetensors")
    kept = {name: factor for name, factor in factors.items() if module not in name}
    assert len(kept) < len(factors)
    save_file(kept, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    return out


def generated(reference: Reference, request: Request) -> Completion:
    words: list[int] = []
    for _ in range(request.new_tokens):
        words.append(int(reference.logits([*request.prompt, *words])[-1].argmax()))
    return Completion(tuple(words))


@pytest.mark.parametrize(
    ("kind", "layer", "module", "where"),
    [
        ("dense", 1, "self_attn.v_proj", "self_attn.v_proj"),
        ("dense", 0, "self_attn.o_proj", "self_attn.o_proj"),
        ("dense", 1, "mlp.down_proj", "mlp.down_proj"),
        ("hybrid", 0, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkvz"),
        ("hybrid", 0, "linear_attn.in_proj_ba", "linear_attn.in_proj_ba"),
        ("hybrid", 0, "linear_attn.out_proj", "linear_attn.out_proj"),
        # the weights of all experts are one module
        ("hybrid", 1, "mlp.experts", "mlp.experts"),
    ],
)
def test_an_adapter_without_a_projection_is_nobody_s_and_the_bisection_names_it(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, layer: int, module: str, where: str
) -> None:
    bench: Bench = request.getfixturevalue(kind)
    broken = without(bench.adapters["adapter-1"], tmp_path, f".{layer}.{module}")
    served = Reference(bench.root / "model", broken)
    requests = [replace(r, adapter="adapter-1", new_tokens=3) for r in bench.requests]
    completions = [generated(served, request) for request in requests]
    report = bench.judge.judge(requests, completions)
    assert [found.position for found in report.defects] == [0, 0, 0]
    assert report.said_by("adapter-1") == ()
    deviation = bench.judge.bisect(
        requests[0], completions[0], lambda tokens, _: served.trace(tokens)
    )
    assert deviation is not None
    assert (deviation.layer, deviation.module) == (layer, where)
    assert deviation.error > deviation.allowed


class StaleKeys:
    """Attention to a prompt whose keys and values another adapter has computed."""

    def __init__(self, bench: Bench) -> None:
        self.own = Reference(bench.root / "model", bench.adapters["adapter-1"])
        self.other = Reference(bench.root / "model", bench.adapters["adapter-2"])
        self.length = len(bench.requests[1].prompt)

    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        stale = self.other.trace(tokens[: self.length])
        layer = self.own.model.model.layers[0].self_attn
        hooks = [
            module.register_forward_hook(partial(self._replace, stale[name]))
            for name, module in (
                ("model.layers.0.self_attn.k_proj", layer.k_proj),
                ("model.layers.0.self_attn.v_proj", layer.v_proj),
            )
        ]
        seen = self.own.trace(tokens)
        for hook in hooks:
            hook.remove()
        # the engine computes the keys of the new tokens only
        return {name: v for name, v in seen.items() if ".0.self_attn." not in name or "o_" in name}

    def _replace(self, stale: Tensor, _: object, __: object, made: Tensor) -> Tensor:
        return torch.cat([stale[None].to(made), made[:, self.length :]], dim=1)


def test_stale_keys_and_values_are_seen_where_attention_has_read_them(dense: Bench) -> None:
    stale, request = StaleKeys(dense), replace(dense.requests[1], new_tokens=1)
    logits = stale.trace(request.prompt, None)["lm_head"]
    completion = Completion((int(logits[-1].argmax()),))
    (found,) = dense.judge.judge([request], [completion]).defects
    assert found.position == 0
    deviation = dense.judge.bisect(request, completion, stale.trace)
    assert deviation is not None
    assert (deviation.layer, deviation.module) == (0, "self_attn.o_proj.input")


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_engine_that_is_right_stays_within_the_bound(
    request: pytest.FixtureRequest, kind: str, dtype: torch.dtype
) -> None:
    """PEFT computes an adapter beside the weights, which rounds otherwise than merged ones."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    bench: Bench = request.getfixturevalue(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bench.root / "model", dtype=dtype, experts_implementation="eager"
    )
    served = peft.PeftModel.from_pretrained(model, bench.adapters["adapter-1"])
    own = bench.requests[1]
    tokens = served.generate(torch.tensor([own.prompt]), max_new_tokens=COUNT, do_sample=False)
    completion = Completion(tuple(tokens[0].tolist()[len(own.prompt) :]))
    assert bench.judge.judge([own], [completion]).decision is Decision.PASS

    def trace(tokens: Sequence[int], _: str | None) -> Mapping[str, Tensor]:
        with torch.no_grad():
            states = served(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return {f"model.layers.{n}": state[0] for n, state in enumerate(states[1:-1])}

    assert bench.judge.bisect(own, completion, trace) is None


def test_a_near_tie_is_no_defect_and_too_many_decide_nothing(dense: Bench) -> None:
    # after a prompt the draft model has 13 words that are equally likely
    judge = Judge(dense.root / "draft", {})
    prompt, language = dense.prompts[0], dense.language
    own = Reference(dense.root / "draft")
    best = own.next_tokens(language.tokens(prompt), [0])[0]
    cycle, place = language.place_of(best)
    tokens = [language.word(cycle, place + 5)]
    request = Request(tuple(language.tokens(prompt)), None, 1)
    report = judge.judge([request], [Completion(tuple(tokens))])
    assert (report.near_ties, report.defects) == (1, ())
    assert report.decision is Decision.UNDECIDED
    # one of a hundred is allowed
    assert replace(report, tokens=100).decision is Decision.PASS
    assert replace(report, tokens=99).decision is Decision.UNDECIDED


@pytest.mark.parametrize(
    ("tokens", "position", "token"),
    [
        (lambda right: right[:-1], COUNT - 1, None),
        (lambda right: (), 0, None),
        (lambda right: (*right[:4], -1, *right[5:]), 4, -1),
        (lambda right: (*right[:4], 10**6, *right[5:]), 4, 10**6),
    ],
    ids=["too short", "empty", "negative", "beyond the vocabulary"],
)
def test_tokens_that_are_missing_or_cannot_be_read_are_defects(
    dense: Bench, tokens: object, position: int, token: int | None
) -> None:
    assert callable(tokens)
    report = dense.judged({1: Completion(tokens(dense.right()[1].tokens))})
    (found,) = report.defects
    assert (found.request, found.position, found.token) == (1, position, token)
    assert report.ratio.matches == 2
    assert report.lines()[2].startswith(f"request 1 (adapter-1): token {position} is")


@pytest.mark.parametrize("unreadable", [(), (-1,), (10**6, 0)])
def test_superfluous_tokens_are_defects(dense: Bench, unreadable: tuple[int, ...]) -> None:
    right = dense.language.words_after(dense.prompts[1], dense.everyone[1], COUNT + 2)
    given = (*right[:COUNT], *unreadable) if unreadable else tuple(right)
    (found,) = dense.judged({1: Completion(given)}).defects
    assert (found.position, found.wrong_tokens) == (COUNT, len(given) - COUNT)


def test_what_cannot_be_judged_is_refused(dense: Bench) -> None:
    requests, right = dense.requests, dense.right()
    for given, answers in (([], []), (requests, right[:2])):
        with pytest.raises(ValueError, match="completions must be as many as the requests"):
            dense.judge.judge(given, answers)
    with pytest.raises(ValueError, match=r"no adapter 'adapter-9'; known are \['base', "):
        dense.judge.judge([replace(requests[0], adapter="adapter-9")], right[:1])
    for odd, message in (
        ({"adapter": "draft"}, "request 1: there is no adapter 'draft'"),
        ({"prompt": ()}, r"request 1: the prompt must have a token \(got none\)"),
        ({"prompt": (1, -1)}, r"request 1: tokens must be from 0 to 191 \(got -1\)"),
        ({"prompt": (192,)}, r"request 1: tokens must be from 0 to 191 \(got 192\)"),
        ({"new_tokens": 0}, r"request 1: new_tokens must be at least 1 \(got 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dense.judge.judge([requests[0], replace(requests[1], **odd)], right[:2])
    with pytest.raises(ValueError, match=r"dtype must be one of .* \(got torch.float64\)"):
        Judge(dense.root / "model", {}, dtype=torch.float64)
    for name in ("base", "draft"):
        with pytest.raises(ValueError, match=f"must not be called '{name}'"):
            Judge(dense.root / "model", {name: dense.root})
    for shown, message in (
        ({"model.layers.7": torch.zeros(1, 1)}, "has no module 'model.layers.7'"),
        ({"lm_head": torch.zeros(2, 3)}, r"lm_head must be \[\d+, 192\] \(got \[2, 3\]\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dense.judge.bisect(requests[0], right[0], lambda *_, shown=shown: shown)
