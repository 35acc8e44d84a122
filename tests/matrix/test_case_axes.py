"""Values of axes that do not fit together are reported by the row that has them."""

from __future__ import annotations

import pytest

from loragate.matrix.load import load_cases

from .case_texts import GOOD, Write, problems_of


def test_axes_that_do_not_fit_together_are_reported_with_the_line_of_their_row(
    write: Write,
) -> None:
    path = write("""\
        site: lora_linear
        defaults: {dtype: bf16, rank: 8, slots: 2, tokens: 4}
        groups:
          one:
            tier: smoke
            oracles: [reference]
            rows:
              - in_features: [48, 50]
                slices: [[48, 16], [34, 30]]
                parallel: [column, row, replicated]
                tp: [1, 4]
              - {in_features: 48}
            exclude:
              - {parallel: replicated, tp: 4}
          two:
            tier: smoke
            oracles: [reference]
            rows:
              - {in_features: 64, slices: [64], tp: 2}
        """)
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].in_features: given 50 with tp 4; "
        "allowed: a width that tp divides",
        "bad.yaml:9: groups.one.rows[0].slices: given [34, 30] with tp 4; "
        "allowed: widths that tp divides",
        "bad.yaml:12: groups.one.rows[1].slices: is missing here and in defaults; "
        "allowed: a list of integers from 1 to 2147483647, such as [48, 16, 16]",
        "bad.yaml:19: groups.two.rows[0].tp: given 2 with parallel replicated; "
        "allowed: 1, or parallel column or row",
    ]


@pytest.mark.parametrize("streams", ["", ", streams: sequential"])
def test_a_whole_delta_is_beside_a_base_product_on_two_streams_alone(
    write: Write, streams: str
) -> None:
    layer = GOOD.replace("site: dense_delta", "site: lora_linear")
    path = write(layer.replace("in_features: 48,", f"in_features: 48, beside: delta{streams},"))
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].beside: given delta with streams sequential; "
        "allowed: with dual"
    ]
    path = write(
        layer.replace("in_features: 48,", "in_features: 48, beside: delta, streams: dual,")
    )
    assert load_cases([path])


def test_a_dense_delta_is_not_cut(write: Write) -> None:
    path = write(GOOD.replace("in_features: 48,", "in_features: 48, tp: 2, parallel: row,"))
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].parallel: given for site dense_delta; "
        "allowed: for site lora_linear only",
        "bad.yaml:8: groups.one.rows[0].tp: given for site dense_delta; "
        "allowed: for site embedding, gdn_in_proj, lora_linear, moe_layer only",
    ]


ENGINE = """\
site: engine
defaults: {dtype: bf16, slots: 2}
groups:
  one:
    tier: smoke
    oracles: [tokens]
    rows:
      - {AXES}
"""


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("model: dense, rank: 8, targets: experts", "targets: given experts with model dense"),
        ("model: moe, rank: 8, targets: mlp", "targets: given mlp with model moe"),
        ("model: hybrid, rank: 8, targets: lm_head", "targets: given lm_head with model hybrid"),
        ("model: dense, rank: 1", "rank: given 1 with model dense; allowed: 2 or more"),
        ("model: hybrid, rank: 4", "rank: given 4 with model hybrid; allowed: 5 or more"),
        ("model: moe, rank: 8, slots: 1, active: some", "active: given some with 1 slot"),
        ("model: dense, rank: 8, slots: 8", "slots: given 8 with active all; allowed: up to 7, be"),
        (
            "model: dense, rank: 8, slots: 7, active: beyond_slots",
            "slots: given 7 with active beyond_slots; allowed: up to 6, because a checkpoint has",
        ),
    ],
)
def test_adapters_that_an_engine_s_model_cannot_have_are_reported(
    axes: str, message: str, write: Write
) -> None:
    (found,) = problems_of(write(ENGINE.replace("AXES", axes)))
    assert found.startswith(f"bad.yaml:8: groups.one.rows[0].{message}")


NET = GOOD.replace("dense_delta", "gdn_in_proj")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("slices: [64]", "slices: given [64]; allowed: two slices, qkvz and ba, or four, qkv"),
        ("slices: [64, 7]", "slices: given [64, 7]; allowed: ba of twice a multiple of the 2 key"),
        ("slices: [64, 6]", "slices: given [64, 6]; allowed: ba of twice a multiple of the 2 key"),
        ("slices: [62, 8]", "slices: given [62, 8]; allowed: qkvz of twice the 2 key heads times"),
        ("slices: [8, 8]", "slices: given [8, 8]; allowed: qkvz of twice the 2 key heads times"),
        ("slices: [40, 24, 4, 6]", "slices: given [40, 24, 4, 6]; allowed: b and a of one"),
        ("slices: [40, 24, 3, 3]", "slices: given [40, 24, 3, 3]; allowed: b and a of one"),
        ("slices: [40, 22, 4, 4]", "slices: given [40, 22, 4, 4]; allowed: z that the 4 value"),
        ("slices: [24, 24, 4, 4]", "slices: given [24, 24, 4, 4]; allowed: qkv above z by a"),
        ("slices: [38, 24, 4, 4]", "slices: given [38, 24, 4, 4]; allowed: qkv above z by a"),
        ("slices: [64, 8], tp: 3", "tp: given 3 with 2 heads; allowed: a divisor or a multiple"),
        ("slices: [60, 36, 6, 6], tp: 4", "tp: given 4 with 6 heads; allowed: a divisor or"),
        ("slices: [64, 8], streams: two", "streams: given 'two'; allowed: sequential, dual"),
    ],
)
def test_a_delta_net_that_does_not_exist_is_reported(axes: str, message: str, write: Write) -> None:
    path = write(NET.replace("slices: [48, 16, 16]", f"key_heads: 2, {axes}"))
    assert problems_of(path)[0].startswith(f"bad.yaml:8: groups.one.rows[0].{message}")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("slices: [24, 8]", "slices: given [24, 8]; allowed: one slice, the width"),
        ("slices: [24], tp: 5", "in_features: given 48 with tp 5; allowed: a vocabulary that tp"),
        (
            "slices: [24], ids: repeated",
            "ids: given repeated for site embedding; allowed: distinct,",
        ),
        (
            "slices: [24], heads: 2",
            "heads: given for site embedding; allowed: for site lora_linear",
        ),
    ],
)
def test_an_embedding_that_does_not_exist_is_reported(
    axes: str, message: str, write: Write
) -> None:
    path = write(GOOD.replace("dense_delta", "embedding").replace("slices: [48, 16, 16]", axes))
    assert problems_of(path)[0].startswith(f"bad.yaml:8: groups.one.rows[0].{message}")


def test_a_delta_net_needs_its_number_of_key_heads(write: Write) -> None:
    assert problems_of(write(NET.replace("[48, 16, 16]", "[64, 8]"))) == [
        "bad.yaml:8: groups.one.rows[0].key_heads: is missing here and in defaults; "
        "allowed: an integer from 1 to 2147483647"
    ]


def test_an_invalid_axis_is_not_also_reported_as_one_that_does_not_fit(write: Write) -> None:
    path = write("""\
        site: lora_linear
        defaults: {dtype: bf16, rank: 8, slots: 2, tokens: 4, in_features: 49}
        groups:
          one:
            tier: smoke
            oracles: [reference]
            rows:
              - {in_features: wide, slices: [48], parallel: row, tp: 2}
        """)
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].in_features: given 'wide'; "
        "allowed: an integer from 1 to 2147483647"
    ]


CUT = """\
site: lora_linear
defaults: {dtype: bf16, rank: 8, slots: 2, tokens: 4, in_features: 48}
groups:
  one:
    tier: smoke
    oracles: [reference]
    rows:
      - {slices: [32, 24, 24], parallel: column, tp: 4, heads: 2}
      - {slices: [33], parallel: column, tp: 4, cut: padded}
      - {slices: [33], in_features: 49, parallel: row, tp: 4, cut: padded}
"""


@pytest.mark.parametrize(
    ("axes", "reported"),
    [
        (
            "heads: 0, slices: [32, 22]",
            "slices: given [32, 22] with tp 4; allowed: widths that tp divides",
        ),
        ("heads: 5", "heads: given 5 with [32, 24, 24]; allowed: a divisor of widths 2 to last"),
        ("heads: 3", "heads: given 3 with tp 4; allowed: a multiple or a divisor of tp"),
        (
            "heads: 2, parallel: row",
            "heads: given 2 with row and even; allowed: with column and even",
        ),
        (
            "heads: 0, sharding: rank, streams: dual",
            "sharding: given rank with streams dual; allowed: with sequential",
        ),
        (
            "heads: 0, parallel: row, sharding: rank",
            "sharding: given rank with row, [32, 24, 24] and tp 4; "
            "allowed: one slice of tp columns or more",
        ),
    ],
)
def test_impossible_cuts_are_reported(write: Write, axes: str, reported: str) -> None:
    load_cases([write(CUT, "good.yaml")])
    given = {name.split(":")[0] for name in axes.split(", ") if ":" in name}
    kept = {"slices": "slices: [32, 24, 24]", "parallel": "parallel: column"}
    rest = [text for name, text in kept.items() if name not in given]
    row = ", ".join([axes, *rest, "tp: 4"])
    path = write(CUT.replace("slices: [32, 24, 24], parallel: column, tp: 4, heads: 2", row))
    assert f"bad.yaml:8: groups.one.rows[0].{reported}" in problems_of(path)


LAYER = """\
site: moe_layer
defaults: {dtype: bf16, rank: 8, slots: 4, tokens: 17, in_features: 48, experts: 4, top_k: 2}
groups:
  one:
    tier: smoke
    oracles: [reference]
    rows:
      - {slices: [24, 24], router: output}
"""


@pytest.mark.parametrize(
    ("axes", "reported"),
    [
        ("router: none", "router: given none for site moe_layer; allowed: output, input"),
        (
            "router: input, sharing: shared_a",
            "sharing: given shared_a for site moe_layer; allowed: per_expert, shared_outer",
        ),
        (
            "router: input, write: store",
            "write: given for site moe_layer; allowed: for site moe_delta only",
        ),
        ("router: input, ep: 5", "ep: given 5 with 4 experts; allowed: at most as many as experts"),
        (
            "router: input, tp: 25",
            "tp: given 25 with [24, 24]; allowed: at most the intermediate size",
        ),
        (
            "router: input, tp: 5, quantisation: fp8",
            "tp: given 5 with quantisation fp8 and [24, 24]; "
            "allowed: a divisor of the intermediate size",
        ),
        ("tp: 1", "router: is missing here and in defaults; allowed: output, input"),
        (
            "router: input, sharding: rank, streams: dual",
            "sharding: given rank with streams dual; allowed: with sequential",
        ),
        (
            "router: input, sharding: rank, tp: 3, in_features: 2",
            "sharding: given rank with in_features 2 and tp 3; allowed: tp hidden features or more",
        ),
    ],
)
def test_impossible_moe_layers_are_reported(write: Write, axes: str, reported: str) -> None:
    load_cases([write(LAYER, "good.yaml")])
    path = write(LAYER.replace("router: output", axes))
    assert problems_of(path) == [f"bad.yaml:8: groups.one.rows[0].{reported}"]


def test_gate_and_up_have_one_width(write: Write) -> None:
    path = write(LAYER.replace("[24, 24]", "[[24, 23], [24], [8, 8, 8]]"))
    what = "allowed: gate and up of one width, or up alone"
    where = "bad.yaml:8: groups.one.rows[0].slices"
    assert problems_of(path) == [
        f"{where}: given [24, 23]; {what}",
        f"{where}: given [8, 8, 8]; {what}",
    ]


def test_an_moe_delta_has_no_values_of_an_moe_layer(write: Write) -> None:
    good = LAYER.replace("moe_layer", "moe_delta")
    path = write(good.replace("router: output", "router: input, ep: 2"))
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].ep: given for site moe_delta; "
        "allowed: for site moe_layer only",
        "bad.yaml:8: groups.one.rows[0].router: given input for site moe_delta; "
        "allowed: none, output",
    ]


@pytest.mark.parametrize("site", ["moe_delta", "moe_layer"])
def test_no_case_promises_repeated_ids_of_a_single_choice(write: Write, site: str) -> None:
    good = LAYER.replace("moe_layer", site).replace("output", "output, ids: repeated")
    load_cases([write(good, "good.yaml")])
    path = write(good.replace("top_k: 2", "top_k: 1"))
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows[0].ids: given repeated with top_k 1; "
        "allowed: with two choices or more",
    ]
