"""All problems of a case file are reported in its own terms, and none of its cases is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from loragate.matrix.load import load_cases
from loragate.matrix.problems import CaseFileError

Write = Callable[..., Path]

GOOD = """\
site: dense_delta
defaults: {dtype: bf16, rank: 8, slots: 4, tokens: 17}
groups:
  one:
    tier: smoke
    oracles: [reference]
    rows:
      - {in_features: 48, slices: [48, 16, 16]}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a case file and returns its path, relative to the working folder."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "bad.yaml") -> Path:
        Path(name).write_text(dedent(text))
        return Path(name)

    return _write


def _reported(*paths: Path) -> list[str]:
    with pytest.raises(CaseFileError) as caught:
        load_cases(paths)
    lines = str(caught.value).splitlines()
    if len(lines) == 1:
        return [lines[0].removeprefix("nothing was run: ")]
    assert lines[0] == f"{len(lines) - 1} problems in the case files, nothing was run:"
    return [line.strip() for line in lines[1:]]


def test_all_problems_of_a_file_are_reported_at_once(write: Write) -> None:
    path = write("""\
        site: dense_delt
        defaults:
          dtype: bf61
          mix: [ragged, single]
          layuot: contiguous
        groups:
          one:
            tier: smok
            oracles: [reference, exakt]
            timeout_s: 0
            rows:
              - {tokens: -1, in_features: 48, slices: [48, 0], rank: 513, slots: 4}
              - tokens: 17
                in_features: "48"
                slices: 16
                rank: [8, 8]
                slots: 0
                tokens: 3
              - 5
            exclude:
              - {mix: all_base}
              - {}
            sample: {limit: 0}
          two:
            teir: smoke
            rows: []
          three: 7
        extra: 1
        """)
    axes = (
        "model, speculation, graphs, specialize, active, prefix_caching, prefill, targets, "
        "logprobs, tokens, in_features, slices, rank, slots, dtype, "
        "mix, ranks, layout, execution, parallel, tp, "
        "experts, top_k, source, routing, expert_map, sharing, router, write, path, "
        "ep, quantisation, ids, bias, base, buffers, loading, cut, heads, sharding, input_dims, "
        "spare_rows, streams, beside, key_heads, products, activation, gate_up, placement, "
        "expert_bias, plans"
    )
    oracles = (
        "reference, exact, base_rows, canary, repeat, permute, sequence, guard, compile, "
        "isolation, range, work, batch_invariance, queue, graph, race, "
        "schedule, overlap, hot_path, inventory, "
        "tokens, engine_properties, liveness"
    )
    keys = "tier, oracles, rows, timeout_s, exclude, include, sample"
    slices = "a list of integers >= 1, such as [48, 16, 16]"
    one = "groups.one"
    assert _reported(path) == [
        "bad.yaml:1: site: given 'dense_delt'; allowed: dense_delta, lora_linear, "
        "moe_delta, moe_layer, gdn_in_proj, embedding, engine; nearest: dense_delta",
        "bad.yaml:3: defaults.dtype: given 'bf61'; allowed: fp16, bf16, fp32; nearest: bf16",
        "bad.yaml:4: defaults.mix: given 2 values; allowed: one value, a list belongs in a row",
        f"bad.yaml:5: defaults.layuot: given unknown key 'layuot'; allowed: {axes}; "
        "nearest: layout",
        f"bad.yaml:8: {one}.tier: given 'smok'; allowed: smoke, premerge, nightly; nearest: smoke",
        f"bad.yaml:9: {one}.oracles[1]: given 'exakt'; allowed: {oracles}; nearest: exact",
        f"bad.yaml:10: {one}.timeout_s: given 0; allowed: a number of seconds > 0",
        f"bad.yaml:12: {one}.rows[0].rank: given 513; allowed: an integer from 1 to 512",
        f"bad.yaml:12: {one}.rows[0].slices[1]: given 0; allowed: {slices}",
        f"bad.yaml:12: {one}.rows[0].tokens: given -1; allowed: an integer >= 0",
        f"bad.yaml:14: {one}.rows[1].in_features: given '48'; allowed: an integer >= 1",
        f"bad.yaml:15: {one}.rows[1].slices: given 16; allowed: {slices}",
        f"bad.yaml:16: {one}.rows[1].rank: given 8 twice; allowed: each value once",
        f"bad.yaml:17: {one}.rows[1].slots: given 0; allowed: an integer from 1 to 256",
        f"bad.yaml:18: {one}.rows[1]: key 'tokens' is repeated, first in line 13",
        f"bad.yaml:19: {one}.rows[2]: given 5; allowed: a mapping with keys of {axes}",
        f"bad.yaml:21: {one}.exclude[0]: leaves nothing out; "
        "allowed: values that some row of the group has",
        f"bad.yaml:22: {one}.exclude[1]: names no axis; allowed: one or more",
        f"bad.yaml:23: {one}.sample.limit: given 0; allowed: an integer >= 1",
        f"bad.yaml:25: groups.two.oracles: is missing; allowed: {oracles}",
        f"bad.yaml:25: groups.two.teir: given unknown key 'teir'; allowed: {keys}; nearest: tier",
        "bad.yaml:25: groups.two.tier: is missing; allowed: smoke, premerge, nightly",
        "bad.yaml:26: groups.two.rows: given []; allowed: a list of one row or more",
        f"bad.yaml:27: groups.three: given 7; allowed: a mapping with keys of {keys}",
        "bad.yaml:28: extra: given unknown key 'extra'; allowed: site, defaults, groups",
    ]


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
    assert _reported(path) == [
        "bad.yaml:8: groups.one.rows[0].in_features: given 50 with tp 4; "
        "allowed: a width that tp divides",
        "bad.yaml:9: groups.one.rows[0].slices: given [34, 30] with tp 4; "
        "allowed: widths that tp divides",
        "bad.yaml:12: groups.one.rows[1].slices: is missing here and in defaults; "
        "allowed: a list of integers >= 1, such as [48, 16, 16]",
        "bad.yaml:19: groups.two.rows[0].tp: given 2 with parallel replicated; "
        "allowed: 1, or parallel column or row",
    ]


def test_a_dense_delta_is_not_cut(write: Write) -> None:
    path = write(GOOD.replace("in_features: 48,", "in_features: 48, tp: 2, parallel: row,"))
    assert _reported(path) == [
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
    ],
)
def test_adapters_that_an_engine_s_model_cannot_have_are_reported(
    axes: str, message: str, write: Write
) -> None:
    (found,) = _reported(write(ENGINE.replace("AXES", axes)))
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
    assert _reported(path)[0].startswith(f"bad.yaml:8: groups.one.rows[0].{message}")


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
    assert _reported(path)[0].startswith(f"bad.yaml:8: groups.one.rows[0].{message}")


def test_a_delta_net_needs_its_number_of_key_heads(write: Write) -> None:
    assert _reported(write(NET.replace("[48, 16, 16]", "[64, 8]"))) == [
        "bad.yaml:8: groups.one.rows[0].key_heads: is missing here and in defaults; "
        "allowed: an integer >= 1"
    ]


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        (
            "timeout_s: 1e3",
            "groups.one.timeout_s: given '1e3'; allowed: a number of seconds > 0; "
            "YAML reads 1e3 as text, write it with a point and a signed exponent",
        ),
        (
            "timeout_s: on",
            "groups.one.timeout_s: given True; allowed: a number of seconds > 0; "
            "YAML reads on as a boolean, quote it",
        ),
        (
            "timeout_s: .inf",
            "groups.one.timeout_s: given inf; allowed: a number of seconds > 0",
        ),
        (
            "timeout_s: 010",
            "groups.one.timeout_s: given 010, which YAML reads as 8; write it as a plain decimal",
        ),
        (
            "timeout_s: 1:30",
            "groups.one.timeout_s: given 1:30, which YAML reads as 90; write it as a plain decimal",
        ),
        ("timeout_s:", "groups.one.timeout_s: given nothing; allowed: a number of seconds > 0"),
        ("on: 1", "groups.one: given key on, read as bool; allowed: text, quote it"),
        ("8: 1", "groups.one: given key 8, read as int; allowed: text, quote it"),
        (
            "<<: {tier: smoke}",
            "groups.one: merge keys are not allowed; write the keys out, or use `defaults`",
        ),
        ("tier: nightly", "groups.one: key 'tier' is repeated, first in line 5"),
    ],
)
def test_what_yaml_silently_turns_into_something_else_is_reported(
    write: Write, written: str, reported: str
) -> None:
    path = write(GOOD.replace("    oracles", f"    {written}\n    oracles"))
    assert _reported(path) == [f"bad.yaml:6: {reported}"]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            "",
            "bad.yaml:1: given nothing; allowed: a mapping with keys of site, defaults, groups",
        ),
        (
            "- 1",
            "bad.yaml:1: given [1]; allowed: a mapping with keys of site, defaults, groups",
        ),
        ("a: [1\nb: 2", "bad.yaml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n---\nb: 2", "bad.yaml:2: not YAML: but found another document"),
        ("a: &x [*x]", "bad.yaml:1: nested deeper than 16 levels"),
    ],
)
def test_text_that_is_no_case_file_at_all_is_reported_without_a_traceback(
    write: Write, text: str, reported: str
) -> None:
    assert _reported(write(text)) == [reported]


def test_a_tag_builds_no_object(write: Write) -> None:
    path = write(GOOD.replace("smoke", "!!python/object/apply:os.getcwd []"))
    reported = _reported(path)
    assert len(reported) == 1
    assert reported[0].startswith("bad.yaml:5: groups.one.tier: given")


def test_problems_of_all_files_are_reported_together_with_files_that_cannot_be_read(
    write: Write,
) -> None:
    first = write(GOOD.replace("rank: 8", "rank: 0"), "first.yaml")
    Path("second.yaml").write_bytes(b"site: \xff")
    assert _reported(first, Path("second.yaml"), Path("third.yaml")) == [
        "first.yaml:2: defaults.rank: given 0; allowed: an integer from 1 to 512",
        "second.yaml: is no YAML file: not UTF-8 at byte 6",
        "third.yaml: there is no such file; did you mean first.yaml?",
    ]


def test_a_case_in_two_files_is_reported_with_both_places(write: Write) -> None:
    first = write(GOOD, "first.yaml")
    second = write(GOOD.replace("[48, 16, 16]", "[[33], [48, 16, 16]]"), "second.yaml")
    name = (
        "dense_delta.dtype-bf16.exec-eager.in-48.layout-contiguous.mix-ragged.rank-8"
        ".ranks-mixed.slices-48x16x16.slots-4.tokens-17"
    )
    assert _reported(first, second) == [
        f"second.yaml:8: groups.one.rows[0]: gives the case {name}, as first.yaml:8 already does"
    ]


def test_a_repeated_case_is_reported_beside_an_unknown_key_but_not_for_an_unknown_site(
    write: Write,
) -> None:
    first = write(GOOD, "first.yaml")
    second = write(GOOD + "extra: 1\n", "second.yaml")
    extra, repeated = sorted(_reported(first, second), reverse=True)
    assert extra.startswith("second.yaml:9: extra: given unknown key")
    assert repeated.startswith("second.yaml:8: groups.one.rows[0]: gives the case")
    linear = write(GOOD.replace("dense_delta", "lora_linear"), "first.yaml")
    unknown = write(GOOD.replace("dense_delta", "moe"), "second.yaml")
    assert [text.partition(";")[0] for text in _reported(linear, unknown)] == [
        "second.yaml:1: site: given 'moe'"
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
    assert _reported(path) == [
        "bad.yaml:8: groups.one.rows[0].in_features: given 'wide'; allowed: an integer >= 1"
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
    ],
)
def test_impossible_cuts_are_reported(write: Write, axes: str, reported: str) -> None:
    load_cases([write(CUT, "good.yaml")])
    given = {name.split(":")[0] for name in axes.split(", ") if ":" in name}
    kept = {"slices": "slices: [32, 24, 24]", "parallel": "parallel: column"}
    rest = [text for name, text in kept.items() if name not in given]
    row = ", ".join([axes, *rest, "tp: 4"])
    path = write(CUT.replace("slices: [32, 24, 24], parallel: column, tp: 4, heads: 2", row))
    assert f"bad.yaml:8: groups.one.rows[0].{reported}" in _reported(path)


def test_a_large_product_without_a_sample_is_refused_before_it_is_enumerated(
    write: Write,
) -> None:
    numbers = ", ".join(map(str, range(1, 513)))
    row = f"- {{in_features: [{numbers}], rank: [{numbers}], tokens: [{numbers}], slices: [1]}}"
    path = write(GOOD.replace("- {in_features: 48, slices: [48, 16, 16]}", row))
    assert _reported(path) == [
        "bad.yaml:8: groups.one.rows: given a product of 134217728 cases; allowed: at most 128, "
        "or a pairwise sample of it: `sample: {limit: N}`"
    ]


def test_a_sample_that_is_too_small_for_its_pairs_is_refused(write: Write) -> None:
    row = "- {in_features: [1, 2, 3], rank: [1, 2, 3, 4], slices: [48]}"
    text = GOOD.replace("- {in_features: 48, slices: [48, 16, 16]}", row)
    path = write(text + "    sample: {limit: 11}\n")
    assert _reported(path) == [
        "bad.yaml:9: groups.one.sample.limit: given 11; "
        "allowed: at least 12, which pairwise coverage takes"
    ]


def test_a_row_whose_points_are_all_excluded_is_reported(write: Write) -> None:
    path = write(GOOD + "    exclude:\n      - {in_features: [48, 50]}\n")
    assert _reported(path) == ["bad.yaml:8: groups.one.rows[0]: every point of it is excluded"]


def test_an_include_is_a_single_complete_point(write: Write) -> None:
    extra = "    include:\n      - {in_features: [1, 2], slices: [1]}\n      - {slices: [1]}\n"
    assert _reported(write(GOOD + extra)) == [
        "bad.yaml:10: groups.one.include[0].in_features: given 2 values; "
        "allowed: one value, an include is a single point",
        "bad.yaml:11: groups.one.include[1].in_features: is missing here and in defaults; "
        "allowed: an integer >= 1",
    ]


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
    ],
)
def test_impossible_moe_layers_are_reported(write: Write, axes: str, reported: str) -> None:
    load_cases([write(LAYER, "good.yaml")])
    path = write(LAYER.replace("router: output", axes))
    assert _reported(path) == [f"bad.yaml:8: groups.one.rows[0].{reported}"]


def test_gate_and_up_have_one_width(write: Write) -> None:
    path = write(LAYER.replace("[24, 24]", "[[24, 23], [24], [8, 8, 8]]"))
    what = "allowed: gate and up of one width, or up alone"
    where = "bad.yaml:8: groups.one.rows[0].slices"
    assert _reported(path) == [
        f"{where}: given [24, 23]; {what}",
        f"{where}: given [8, 8, 8]; {what}",
    ]


def test_an_moe_delta_has_no_values_of_an_moe_layer(write: Write) -> None:
    good = LAYER.replace("moe_layer", "moe_delta")
    path = write(good.replace("router: output", "router: input, ep: 2"))
    assert _reported(path) == [
        "bad.yaml:8: groups.one.rows[0].ep: given for site moe_delta; "
        "allowed: for site moe_layer only",
        "bad.yaml:8: groups.one.rows[0].router: given input for site moe_delta; "
        "allowed: none, output",
    ]
