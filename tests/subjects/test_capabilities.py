"""What a subject may state about the axes of the matrix, and what is assumed of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.core.checkout import project_root
from loragate.matrix.axis import Unstated
from loragate.matrix.case import AXES, Case, Dtype, Execution, Path, Site, Source
from loragate.matrix.load import load_cases
from loragate.protocol import Capabilities, unsupported
from loragate.subjects.vllm.subject import VllmSubject
from loragate.subjects.vllm_lorakernels.subject import VllmLoraKernelsSubject

CASE = Case(
    site=Site.MOE_DELTA,
    tokens=4,
    in_features=32,
    slices=(16,),
    rank=8,
    slots=2,
    dtype=Dtype.BF16,
    experts=4,
    top_k=2,
)
STATED = {"dtype": {Dtype.BF16}, "execution": {Execution.EAGER}, "rank": range(1, 513)}


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        ({"layuot": {"contiguous"}}, "unknown axis 'layuot'; allowed: .*; nearest: layout"),
        ({"dtype": set()}, r"\['dtype'\]: given no values; allowed: fp16, bf16, fp32"),
        ({"rank": range(0)}, r"\['rank'\]: given no values; allowed: an integer from 1 to 512"),
        ({"dtype": {"bf61"}}, r"\['dtype'\]: given 'bf61'; allowed: .*; nearest: bf16"),
        ({"dtype": "bf16"}, r"\['dtype'\]: given 'bf16'; allowed: a collection of values"),
        ({"rank": {"8"}}, r"\['rank'\]: given '8'; allowed: an integer from 1 to 512"),
    ],
)
def test_capabilities_refuse_axes_and_values_that_do_not_exist(
    supports: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Capabilities(sites=frozenset(Site), supports={**STATED, **supports})  # type: ignore[dict-item]


@pytest.mark.parametrize("axis", STATED)
def test_capabilities_must_state_dtypes_executions_and_ranks(axis: str) -> None:
    stated = {name: values for name, values in STATED.items() if name != axis}
    with pytest.raises(ValueError, match=rf"\['{axis}'\]: is missing; allowed: a collection"):
        Capabilities(sites=frozenset(Site), supports=stated)


def test_only_the_axes_that_every_subject_must_state_are_without_an_assumption() -> None:
    unstated = {name for name, axis in AXES.items() if axis.unstated is Unstated.ERROR}
    assert unstated == STATED.keys()


def test_each_unsupported_value_is_a_reason_in_its_own_terms() -> None:
    supports = {**STATED, "rank": range(2, 9), "experts": range(1, 5), "source": {Source.PAIR}}
    have = Capabilities(sites=frozenset({Site.MOE_DELTA, Site.DENSE_DELTA}), supports=supports)
    pair = replace(CASE, source=Source.PAIR)
    assert unsupported(pair, have) is None
    reasons = {
        "site lora_linear is not supported": replace(pair, site=Site.LORA_LINEAR),
        "dtype fp32 is not supported": replace(pair, dtype=Dtype.FP32),
        "rank 9 is above the limit of 8": replace(pair, rank=9),
        "rank 1 is not supported": replace(pair, rank=1),
        "5 experts are above the limit of 4": replace(pair, experts=5),
        "source token is not supported": CASE,
        # nothing is stated about it, and its default alone is assumed
        "path one_shot is not supported": replace(pair, path=Path.ONE_SHOT),
    }
    assert {reason: unsupported(case, have) for reason, case in reasons.items()} == {
        reason: reason for reason in reasons
    }
    # an axis that the site does not have says nothing
    assert unsupported(replace(CASE, site=Site.DENSE_DELTA), have) is None


def test_what_a_subject_refuses_of_the_values_that_it_supports_is_skipped_with_its_reason() -> None:
    have = Capabilities(
        sites=frozenset({Site.MOE_DELTA}),
        supports=STATED,
        refuses=lambda case: "too odd" if case.tokens % 2 else None,
    )
    assert unsupported(CASE, have) is None
    assert unsupported(replace(CASE, tokens=5), have) == "too odd"


def test_every_shipped_case_can_be_asked_of_the_subjects_of_vllm() -> None:
    shipped = load_cases(sorted((project_root() / "cases").glob("*.yaml")))
    plug_in = VllmLoraKernelsSubject.describe
    for interpreted in (True, False):
        for have in (VllmSubject.describe(interpreted, True), plug_in(interpreted)):
            runs = [case.site for case in shipped if unsupported(case, have) is None]
            assert Site.DENSE_DELTA in runs
            # no site without an implementation
            assert Site.GDN_IN_PROJ not in runs
