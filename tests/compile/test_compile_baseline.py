from __future__ import annotations

import json
from pathlib import Path

import pytest

from loragate.compile_leg import BASELINE, expected_count
from loragate.compile_leg.baseline import (
    Baseline,
    BaselineError,
    Record,
    load_baseline,
    save_baseline,
)
from loragate.core.resources import Resources

KEY = ("sm_90", "lora_shrink_kernel", "qkv-bf16-r16-t64")


def _baseline(triton: str = "3.7.1") -> Baseline:
    return Baseline().with_record(Record(triton, {KEY: Resources(64, 0, 4096)}, {KEY: "c0ffee"}))


def test_a_saved_baseline_reads_back_as_it_was(tmp_path: Path) -> None:
    save_baseline(_baseline(), tmp_path / "resources.json")
    assert load_baseline(tmp_path / "resources.json") == _baseline()


def test_each_kernel_has_a_line_of_its_own(tmp_path: Path) -> None:
    save_baseline(_baseline(), tmp_path / "resources.json")
    lines = (tmp_path / "resources.json").read_text().splitlines()
    line = next(line for line in lines if " ".join(KEY) in line)
    entry = json.loads(f"{{{line}}}")
    assert entry == {
        " ".join(KEY): {"registers": 64, "spills": 0, "shared_bytes": 4096, "content": "c0ffee"}
    }


def test_patch_releases_of_triton_share_a_record() -> None:
    baseline = _baseline("3.7.1").with_record(Record("3.8.0", {}))
    assert baseline.find("3.7.0") is baseline.records["3.7"]
    assert baseline.find("3.9.0") is None


def test_recording_a_release_leaves_the_others_alone() -> None:
    baseline = _baseline("3.7.1").with_record(Record("3.8.0", {}))
    assert baseline.records["3.7"].entries[KEY] == Resources(64, 0, 4096)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Invalid JSON"),
        ('{"schema": 1, "records": {}}', r"schema must be 2 \(got 1\)"),
        ('{"schema": 2, "records": {}, "more": 1}', "more: Unexpected keyword argument"),
        (
            '{"schema": 2, "records": {"3.7": {"triton": "3.7.1", "entries": {"sm_90 k": '
            '{"registers": 1, "spills": 0, "shared_bytes": 0, "content": ""}}}}}',
            "'sm_90 k' must be arch, kernel and specialisation",
        ),
        (
            '{"schema": 2, "records": {"3.7": {"triton": "3.7.1", "entries": {"a b c": '
            '{"registers": 1, "spills": 0, "content": ""}}}}}',
            "records.3.7.entries.a b c.shared_bytes: Field required",
        ),
    ],
)
def test_a_damaged_baseline_is_refused_with_file_and_field(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "resources.json"
    path.write_text(text)
    with pytest.raises(BaselineError, match=f"^{path}: .*{complaint}"):
        load_baseline(path)


def test_a_missing_baseline_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match=r"none\.json: cannot be read"):
        load_baseline(tmp_path / "none.json")


def test_the_expected_count_covers_the_kernels_of_every_release(tmp_path: Path) -> None:
    other = ("sm_90", "lora_expand_kernel", "qkv-bf16-r16-t64")
    baseline = _baseline("3.7.1").with_record(Record("3.8.0", {other: Resources(1, 0, 0)}))
    save_baseline(baseline, tmp_path / "resources.json")
    assert expected_count(tmp_path / "resources.json") == 2


def test_every_kernel_on_record_has_a_content() -> None:
    for record in load_baseline(BASELINE).records.values():
        assert record.contents.keys() == record.entries.keys()
        assert all(len(content) == 32 for content in record.contents.values())


def test_every_release_has_the_same_kernels_on_record() -> None:
    baseline = load_baseline(BASELINE)
    assert {frozenset(record.entries) for record in baseline.records.values()} == {baseline.keys}


def test_every_kernel_in_the_sources_is_on_record_for_every_gpu() -> None:
    """By name: a decorated function whose name ends in `_kernel` is one that is launched."""
    sources = BASELINE.parents[2] / "kernels" / "lorakernels"
    launched = {
        line.removeprefix("def ").partition("(")[0]
        for path in sources.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    recorded = {(arch, kernel) for arch, kernel, _ in load_baseline(BASELINE).keys}
    archs = ("sm_80", "sm_90", "sm_100")
    assert recorded == {(arch, kernel) for kernel in launched for arch in archs}
