"""All problems of a case file are reported in its own terms, and none of its cases is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragate.matrix.load import load_cases, named_files

from .case_texts import GOOD, Write, problems_of


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
        "logprobs, requests, ends, weights, tokens, in_features, slices, rank, slots, dtype, "
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
    slices = "a list of integers from 1 to 2147483647, such as [48, 16, 16]"
    one = "groups.one"
    assert problems_of(path) == [
        "bad.yaml:1: site: given 'dense_delt'; allowed: dense_delta, lora_linear, "
        "moe_delta, moe_layer, gdn_in_proj, embedding, engine; nearest: dense_delta",
        "bad.yaml:3: defaults.dtype: given 'bf61'; allowed: fp16, bf16, fp32; nearest: bf16",
        "bad.yaml:4: defaults.mix: given 2 values; allowed: one value, a list belongs in a row",
        f"bad.yaml:5: defaults.layuot: given unknown key 'layuot'; allowed: {axes}; "
        "nearest: layout",
        f"bad.yaml:8: {one}.tier: given 'smok'; allowed: smoke, premerge, nightly; nearest: smoke",
        f"bad.yaml:9: {one}.oracles[1]: given 'exakt'; allowed: {oracles}; nearest: exact",
        f"bad.yaml:10: {one}.timeout_s: given 0; allowed: a number of seconds > 0, up to 86400",
        f"bad.yaml:12: {one}.rows[0].rank: given 513; allowed: an integer from 1 to 512",
        f"bad.yaml:12: {one}.rows[0].slices[1]: given 0; allowed: {slices}",
        f"bad.yaml:12: {one}.rows[0].tokens: given -1; allowed: an integer from 0 to 2147483647",
        f"bad.yaml:14: {one}.rows[1].in_features: given '48'; "
        "allowed: an integer from 1 to 2147483647",
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


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        (
            "timeout_s: 1e3",
            "groups.one.timeout_s: given '1e3'; allowed: a number of seconds > 0, up to 86400; "
            "YAML reads 1e3 as text, write it with a point and a signed exponent",
        ),
        (
            "timeout_s: on",
            "groups.one.timeout_s: given True; allowed: a number of seconds > 0, up to 86400; "
            "YAML reads on as a boolean, quote it",
        ),
        (
            "timeout_s: .inf",
            "groups.one.timeout_s: given inf; allowed: a number of seconds > 0, up to 86400",
        ),
        (
            "timeout_s: 1.0e+300",
            "groups.one.timeout_s: given 1e+300; allowed: a number of seconds > 0, up to 86400",
        ),
        (
            "timeout_s: 010",
            "groups.one.timeout_s: given 010, which YAML reads as 8; write it as a plain decimal",
        ),
        (
            "timeout_s: 1:30",
            "groups.one.timeout_s: given 1:30, which YAML reads as 90; write it as a plain decimal",
        ),
        (
            "timeout_s:",
            "groups.one.timeout_s: given nothing; allowed: a number of seconds > 0, up to 86400",
        ),
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
    assert problems_of(path) == [f"bad.yaml:6: {reported}"]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("[]", "given []; allowed: reference, exact, "),
        ("[exact, exact]", "given exact twice; allowed: each value once"),
    ],
)
def test_a_group_has_an_oracle_and_each_of_them_once(
    write: Write, given: str, reported: str
) -> None:
    (line,) = problems_of(write(GOOD.replace("[reference]", given)))
    assert line.startswith(f"bad.yaml:6: groups.one.oracles: {reported}")


def test_an_oracle_of_engines_is_refused_where_there_is_none_and_the_other_way_round(
    write: Write,
) -> None:
    path = write(GOOD.replace("[reference]", "[reference, tokens]"))
    (line,) = problems_of(path)
    assert line.startswith(
        "bad.yaml:6: groups.one.oracles: given tokens for site dense_delta; allowed: reference, "
    )
    engines = write(GOOD.replace("dense_delta", "engine"))
    assert (
        "bad.yaml:6: groups.one.oracles: given reference for site engine; "
        "allowed: tokens, engine_properties, liveness" in problems_of(engines)
    )


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
        ("[" * 100000, "bad.yaml:1: nested deeper than 16 levels"),
        (
            "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)),
            "bad.yaml:1: more than 200000 values, with each alias written out",
        ),
    ],
)
def test_text_that_is_no_case_file_at_all_is_reported_without_a_traceback(
    write: Write, text: str, reported: str
) -> None:
    assert problems_of(write(text)) == [reported]


def test_a_size_that_no_device_counts_to_is_reported(write: Write) -> None:
    most = 2**31 - 1
    bounds = f"integers from 1 to {most}, such as [48, 16, 16]"
    path = write(GOOD.replace("slices: [48, 16, 16]", f"slices: [48, {most + 1}]"))
    assert problems_of(path) == [
        f"bad.yaml:8: groups.one.rows[0].slices[1]: given {most + 1}; allowed: a list of {bounds}"
    ]
    assert load_cases([write(GOOD.replace("slices: [48, 16, 16]", f"slices: [48, {most}]"))])


def test_a_tag_builds_no_object(write: Write) -> None:
    path = write(GOOD.replace("smoke", "!!python/object/apply:os.getcwd []"))
    (found,) = problems_of(path)
    assert found.startswith("bad.yaml:5: groups.one.tier: given")


def test_problems_of_all_files_are_reported_together_with_files_that_cannot_be_read(
    write: Write,
) -> None:
    first = write(GOOD.replace("rank: 8", "rank: 0"), "first.yaml")
    Path("second.yaml").write_bytes(b"site: \xff")
    assert problems_of(first, Path("second.yaml"), Path("third.yaml")) == [
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
    assert problems_of(first, second) == [
        f"second.yaml:8: groups.one.rows[0]: gives the case {name}, as first.yaml:8 already does"
    ]


def test_a_file_that_is_named_twice_is_read_once(write: Write) -> None:
    path = write(GOOD).absolute()
    assert named_files([path.parent, path]) == (path,)


def test_a_repeated_case_is_reported_beside_an_unknown_key_but_not_for_an_unknown_site(
    write: Write,
) -> None:
    first = write(GOOD, "first.yaml")
    second = write(GOOD + "extra: 1\n", "second.yaml")
    extra, repeated = sorted(problems_of(first, second), reverse=True)
    assert extra.startswith("second.yaml:9: extra: given unknown key")
    assert repeated.startswith("second.yaml:8: groups.one.rows[0]: gives the case")
    linear = write(GOOD.replace("dense_delta", "lora_linear"), "first.yaml")
    unknown = write(GOOD.replace("dense_delta", "moe"), "second.yaml")
    assert [text.partition(";")[0] for text in problems_of(linear, unknown)] == [
        "second.yaml:1: site: given 'moe'"
    ]


def test_a_large_product_without_a_sample_is_refused_before_it_is_enumerated(
    write: Write,
) -> None:
    numbers = ", ".join(map(str, range(1, 513)))
    row = f"- {{in_features: [{numbers}], rank: [{numbers}], tokens: [{numbers}], slices: [1]}}"
    path = write(GOOD.replace("- {in_features: 48, slices: [48, 16, 16]}", row))
    assert problems_of(path) == [
        "bad.yaml:8: groups.one.rows: given a product of 134217728 cases; allowed: at most 128, "
        "or a pairwise sample of it: `sample: {limit: N}`"
    ]


def test_a_sample_that_is_too_small_for_its_pairs_is_refused(write: Write) -> None:
    row = "- {in_features: [1, 2, 3], rank: [1, 2, 3, 4], slices: [48]}"
    text = GOOD.replace("- {in_features: 48, slices: [48, 16, 16]}", row)
    path = write(text + "    sample: {limit: 11}\n")
    assert problems_of(path) == [
        "bad.yaml:9: groups.one.sample.limit: given 11; "
        "allowed: at least 12, which pairwise coverage takes"
    ]


def test_a_row_whose_points_are_all_excluded_is_reported(write: Write) -> None:
    path = write(GOOD + "    exclude:\n      - {in_features: [48, 50]}\n")
    assert problems_of(path) == ["bad.yaml:8: groups.one.rows[0]: every point of it is excluded"]


def test_an_include_is_a_single_complete_point(write: Write) -> None:
    extra = "    include:\n      - {in_features: [1, 2], slices: [1]}\n      - {slices: [1]}\n"
    assert problems_of(write(GOOD + extra)) == [
        "bad.yaml:10: groups.one.include[0].in_features: given 2 values; "
        "allowed: one value, an include is a single point",
        "bad.yaml:11: groups.one.include[1].in_features: is missing here and in defaults; "
        "allowed: an integer from 1 to 2147483647",
    ]
