"""A sample is computed once for all processes of a user, and what is on disk is never trusted to be
whole, to be readable, or to be of this code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.checkout import project_root
from loragate.matrix import sample, sample_cache
from loragate.matrix.load import default_files, load_cases
from loragate.matrix.sample import pairwise

SIZES = [8, 10, 12, 4, 3, 5]
EXCLUDED = [{0: frozenset({2, 1}), 3: frozenset({0})}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the samples, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "loragate" / "samples"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sizes of the samples that are computed."""
    log: list[object] = []
    compute = sample._computed

    def noting(sizes: tuple[int, ...], exclusions: object) -> object:
        log.append(sizes)
        return compute(sizes, exclusions)  # type: ignore[arg-type]

    monkeypatch.setattr(sample, "_computed", noting)
    return log


def sampled() -> list[tuple[int, ...]]:
    """The sample as a new process gets it."""
    sample._sampled.cache_clear()
    sample_cache._content.cache_clear()
    return pairwise(SIZES, EXCLUDED)


def test_a_second_process_computes_nothing(folder: Path, computed: list[object]) -> None:
    first = sampled()
    assert sampled() == first
    assert computed == [tuple(SIZES)]
    assert len(list(folder.iterdir())) == 1


def test_a_small_sample_is_not_kept(folder: Path) -> None:
    sample._sampled.cache_clear()
    pairwise([4, 4, 4], [])
    assert not folder.exists()


def test_the_cases_of_a_file_are_the_same_from_the_folder(
    folder: Path, computed: list[object]
) -> None:
    (path,) = (path for path in default_files(project_root()) if path.stem == "gdn_in_proj")
    sample._sampled.cache_clear()
    first, number = load_cases([path]), len(computed)
    assert any(folder.iterdir())
    sample._sampled.cache_clear()
    assert load_cases([path]) == first
    assert len(computed) - number < number


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(sample_cache, "version", lambda name: "0"),
        lambda patch: patch.setattr(sample_cache, "_content", lambda source: "another"),
    ],
)
def test_another_release_or_another_code_computes_again(
    change: Callable[[pytest.MonkeyPatch], None],
    folder: Path,
    computed: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what clears this has gone when the name is replaced
    first = pairwise_anew()
    change(monkeypatch)
    assert pairwise_anew() == first
    assert len(computed) == 2


def pairwise_anew() -> list[tuple[int, ...]]:
    sample._sampled.cache_clear()
    return pairwise(SIZES, EXCLUDED)


def test_the_code_is_known_by_its_text(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    seen = set()
    for text in ("a = 1", "a = 2"):
        module.write_text(text)
        sample_cache._content.cache_clear()
        seen.add(sample_cache._content(module))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("sizes", "excluded"),
    [
        # the points of the first one would do for these axes, too
        ([9, 10, 12, 4, 3, 5], EXCLUDED),
        (SIZES, []),
        (SIZES, [{0: frozenset({1}), 3: frozenset({0})}]),
        (SIZES, [{1: frozenset({2, 1}), 3: frozenset({0})}]),
    ],
)
def test_another_product_has_another_place(
    sizes: list[int],
    excluded: list[dict[int, frozenset[int]]],
    folder: Path,
    computed: list[object],
) -> None:
    sampled()
    sample._sampled.cache_clear()
    pairwise(sizes, excluded)
    assert len(computed) == 2


def without_a_point(text: str) -> str:
    digest, _, points = text.partition("\n")
    return f"{digest}\n{json.dumps(json.loads(points)[:-1])}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text[: len(text) // 2],
        lambda text: text.partition("\n")[2],
        lambda text: text.replace("[[", "[[8, 0, 0, 0, 0, 0], [", 1),
        lambda text: "[" * 100000,
        # valid, but for one point that nobody would miss
        without_a_point,
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_replaced(
    damage: Callable[[str], str], folder: Path, computed: list[object]
) -> None:
    first = sampled()
    (path,) = folder.iterdir()
    written = path.read_text()
    assert damage(written) != written
    path.write_text(damage(written))
    assert sampled() == first
    assert len(computed) == 2
    assert path.read_text() == written


def test_a_file_of_another_product_is_not_taken_for_this_one(
    folder: Path, computed: list[object]
) -> None:
    first = sampled()
    (own,) = folder.iterdir()
    sample._sampled.cache_clear()
    pairwise(SIZES, [])
    (other,) = set(folder.iterdir()) - {own}
    own.write_text(other.read_text())
    assert sampled() == first
    assert len(computed) == 3


def test_a_file_that_is_no_text_is_replaced(folder: Path, computed: list[object]) -> None:
    first = sampled()
    (path,) = folder.iterdir()
    path.write_bytes(b"\xff\xfe")
    assert sampled() == first
    assert len(computed) == 2


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(
    folder: Path, tmp_path: Path, computed: list[object]
) -> None:
    (tmp_path / "loragate").write_text("a file")
    assert sampled() == sampled()
    assert len(computed) == 2


def test_a_user_without_a_home_gets_samples(
    computed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    # a relative path does not count
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(Path, "home", homeless)
    assert sampled() == sampled()
    assert len(computed) == 2


def test_processes_that_write_at_the_same_time_agree(folder: Path, tmp_path: Path) -> None:
    code = (
        "from loragate.matrix.sample import pairwise\n"
        "print(pairwise([8, 10, 12, 4, 3, 5], [{0: frozenset({2, 1}), 3: frozenset({0})}]))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "012"
    ]
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert outputs == {f"{sampled()}\n"}
    assert [path.suffix for path in folder.iterdir()] == [".json"]
