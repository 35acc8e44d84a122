"""Patterns select cases by the pieces of their ids."""

from __future__ import annotations

import pytest

from loragate.matrix.patterns import SelectionError, is_selected, nearest_ids, selected_ids

SIX = "torch.dense_delta.dtype-bf16.rank-8.slices-16x1024.tokens-6"
SIXTY_FOUR = SIX.replace("tokens-6", "tokens-64")
LINEAR = SIX.replace("dense_delta", "lora_linear").replace("rank-8", "rank-16")
OWN = SIX.replace("torch", "a.b.module:Subject")
# all pieces of SIX and one more
LONGER = SIX.replace("rank-8", "rank-8.ranks-mixed")
IDS = (SIX, SIXTY_FOUR, LINEAR, OWN, LONGER)


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("dense_delta.tokens-6", {SIX, OWN, LONGER}),
        ("torch.dense.tokens-64", {SIXTY_FOUR}),
        # a piece of the pattern may be any part of a piece of the id
        ("linear", {LINEAR}),
        ("delta.rank", {SIX, SIXTY_FOUR, OWN, LONGER}),
        # a substring that spans a dot, and one with a dot at an end
        ("lta.dtype-bf16.rank-8.sl", {SIX, SIXTY_FOUR, OWN, LONGER}),
        (".tokens-64", {SIXTY_FOUR}),
        ("torch.", {SIX, SIXTY_FOUR, LINEAR, LONGER}),
        # a number does not match a part of a number, at either end and in every piece
        ("tokens-6", {SIX, LINEAR, OWN, LONGER}),
        ("rank-1", set()),
        ("rank-8.tokens-4", set()),
        ("24.tokens", set()),
        ("1024.tokens", set(IDS)),
        # in the order of the id, and each piece for itself
        ("tokens-6.dense_delta", set()),
        ("rank-8.rank-8", set()),
        # subjects hold dots and colons
        ("b.module:Subject.tokens-6", {OWN}),
        ("module:Sub", {OWN}),
        # a full id is that case alone
        (SIX, {SIX}),
        (OWN, {OWN}),
        # shell patterns match whole ids
        ("*.tokens-6", {SIX, LINEAR, OWN, LONGER}),
        ("tokens-?", set()),
        ("torch.*_delta.*tokens-6[0-9]", {SIXTY_FOUR}),
    ],
)
def test_a_pattern_selects_the_ids_that_hold_its_pieces_in_order(
    pattern: str, selected: set[str]
) -> None:
    if selected:
        assert selected_ids([pattern], IDS) == selected
    else:
        with pytest.raises(SelectionError):
            selected_ids([pattern], IDS)


def test_every_substring_of_an_id_that_cuts_no_number_selects_it() -> None:
    for start in range(len(SIX)):
        for end in range(start + 1, len(SIX) + 1):
            before, after = SIX[start - 1 : start], SIX[end : end + 1]
            cut = (before + SIX[start]).isdigit() and before != ""
            cut = cut or ((SIX[end - 1] + after).isdigit() and after != "")
            if not cut:
                assert selected_ids([SIX[start:end]], [SIX]), SIX[start:end]


def test_patterns_together_select_what_any_of_them_selects() -> None:
    assert selected_ids(["linear", "tokens-64"], IDS) == {LINEAR, SIXTY_FOUR}
    assert selected_ids([], IDS) == set(IDS)


def test_a_pattern_that_selects_nothing_is_refused_although_another_one_selects() -> None:
    with pytest.raises(SelectionError, match="'nothing' selects none of 5 cases"):
        selected_ids(["linear", "nothing"], IDS)


def test_an_empty_pattern_as_of_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(SelectionError, match="'' selects none of 5 cases"):
        selected_ids([""], IDS)
    assert not is_selected(SIX, [""])


def test_the_nearest_ids_are_found_piece_by_piece() -> None:
    assert nearest_ids("dense_delta.tokns-6", IDS)[0] == SIX
    assert nearest_ids("tokens-6.dense_delta", IDS)[0] == SIX
    assert nearest_ids("linaer.tokens-6", IDS)[0] == LINEAR
    assert nearest_ids("*.dense_detla.*.tokens-64", IDS)[0] == SIXTY_FOUR
    assert nearest_ids(OWN.replace("bf16", "bf61"), IDS)[0] == OWN
    assert nearest_ids("qqqq", IDS) == []
    assert nearest_ids("", IDS) == []


def test_pieces_in_another_order_are_refused_with_the_order_that_selects() -> None:
    with pytest.raises(SelectionError) as caught:
        selected_ids(["tokens-6.dense_delta"], IDS)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  in the order of an id: dense_delta.tokens-6"
    assert lines[2] == f"  nearest: {SIX}"
    for pattern in ("tokens-6.nothing", "tokens-6.tokens-6.dense_delta", "*tokens-6*dense_delta*"):
        with pytest.raises(SelectionError) as caught:
            selected_ids([pattern], IDS)
        assert "in the order" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "options"), [("#3", "--draw 3 "), ("#3.1", "--draw 3 --repeats 2 ")]
)
def test_the_id_of_a_draw_is_refused_with_the_option_that_selects_it(
    suffix: str, options: str
) -> None:
    with pytest.raises(SelectionError) as caught:
        selected_ids([SIX + suffix], IDS)
    assert f"leave out {suffix!r} and add {options}" in str(caught.value)


def test_control_characters_of_a_pattern_are_shown_escaped() -> None:
    with pytest.raises(SelectionError) as caught:
        selected_ids(["a\x1b[31m\n"], IDS)
    assert str(caught.value).startswith(r"'a\x1b[31m\n' selects none of")
