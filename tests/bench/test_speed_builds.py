from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from loragate.bench.speed import comparing
from loragate.bench.speed.builds import build_against, installed_build
from loragate.bench.speed.comparing import Request, compare_builds
from loragate.bench.speed.figures import ResourcePairs, SpeedFigures
from loragate.bench.speed.statistics import Change
from loragate.core.errors import CommandError
from loragate.core.gpus import DriverError, ListedGpu
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode

STUBS = Path(__file__).with_name("stubs")
GPU = Machine("cuda", "test", (9, 0), 132, 1 << 36)


def package(folder: Path, text: str) -> Path:
    """A package lorakernels in `folder` whose calls take as long as `text` says."""
    (folder / "lorakernels").mkdir(parents=True, exist_ok=True)
    (folder / "lorakernels" / "__init__.py").write_text(text)
    return folder


def git(root: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", root, *name, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose first commit, tagged `v1`, takes 10 us; then it is edited."""
    root = tmp_path / "checkout"
    package(root / "kernels", "US = 10.0\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    git(root, "tag", "v1")
    package(root / "kernels", "US = 11.0\n")
    return root


def test_a_revision_is_the_package_as_it_was_committed(checkout: Path, tmp_path: Path) -> None:
    build = build_against("v1", checkout, tmp_path / "build")
    assert (build.folder / "lorakernels" / "__init__.py").read_text() == "US = 10.0\n"
    assert build.name == "v1"


@pytest.mark.parametrize("place", ["", "kernels", "lib/python3.{}/site-packages"])
def test_a_folder_may_be_an_environment_a_checkout_or_the_packages_parent(
    tmp_path: Path, place: str
) -> None:
    import sys

    package(tmp_path / "given" / place.format(sys.version_info.minor), "US = 3.0\n")
    build = build_against(str(tmp_path / "given"), tmp_path, tmp_path / "build")
    assert (build.folder / "lorakernels" / "__init__.py").read_text() == "US = 3.0\n"


@pytest.mark.parametrize(
    ("against", "problem"),
    [
        ("v2", "--against v2: neither a folder nor a revision of the git checkout in"),
        ("--output=x", "neither a folder nor a revision"),
        ("empty", "the revision holds no kernels/lorakernels"),
    ],
)
def test_what_holds_no_build_is_refused(
    checkout: Path, tmp_path: Path, against: str, problem: str
) -> None:
    git(checkout, "rm", "-qrf", "kernels")
    git(checkout, "commit", "-qm", "nothing", "--allow-empty")
    git(checkout, "tag", "empty")
    with pytest.raises(ValueError, match=problem):
        build_against(against, checkout, tmp_path / "build")


def test_a_folder_without_a_build_is_refused_with_the_places_that_were_looked_at(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"holds no lorakernels \(looked for .*site-packages"):
        build_against(str(tmp_path), tmp_path, tmp_path / "build")


def test_each_build_has_its_own_cache_of_kernels_and_equal_builds_share_one(
    tmp_path: Path,
) -> None:
    builds = [
        build_against(str(package(tmp_path / name, text)), tmp_path, tmp_path / f"{name} copy")
        for name, text in (("a", "US = 1.0"), ("b", "US = 1.0"), ("c", "US = 2.0"))
    ]
    caches = [b.environment({}, Path("/cache"))["TRITON_CACHE_DIR"] for b in builds]
    assert caches[0] == caches[1] != caches[2]


def test_the_present_build_is_a_copy_of_what_would_be_imported(tmp_path: Path) -> None:
    build = installed_build(tmp_path / "build")
    assert (build.folder / "lorakernels" / "dense" / "kernels.py").is_file()
    first = build.environment({"PYTHONPATH": "/other"}, Path("/c"))["PYTHONPATH"].split(os.pathsep)
    assert (first[0], first[-1]) == (str(tmp_path / "build"), "/other")


@pytest.fixture
def compared(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], SpeedFigures]:
    """Compares the edited checkout, with another text, with its revision or a folder."""
    monkeypatch.setattr(comparing, "_WORKER", "speed_worker_stub")
    monkeypatch.setattr(comparing, "project_root", lambda: checkout)
    monkeypatch.setattr(
        comparing, "compare_resources", lambda builds, machine, cache: ResourcePairs("sm_90")
    )
    monkeypatch.setenv("PYTHONPATH", str(STUBS), prepend=os.pathsep)

    def compare(against: str, text: str) -> SpeedFigures:
        package(checkout / "kernels", text)
        monkeypatch.setattr(
            comparing,
            "installed_build",
            lambda target: build_against(str(checkout), checkout, target),
        )
        request = Request("dense", ("row 1", "row 2"), None, against)
        return compare_builds(request, GPU, lambda line: None)

    return compare


def test_processes_of_both_builds_are_timed_in_turns_and_judged(
    compared: Callable[[str, str], SpeedFigures],
) -> None:
    figures = compared("v1", "US = 11.0\n")
    assert [(item.row, item.call) for item in figures.comparisons] == [
        ("row 1", "call of row 1"),
        ("row 2", "call of row 2"),
    ]
    assert {item.change for item in figures.comparisons} == {Change.SLOWER}
    assert all(1.09 < item.ratio < 1.11 for item in figures.comparisons)
    assert figures.exit_code is ExitCode.WRONG


def test_a_build_that_cannot_be_measured_is_named_with_the_reason(
    compared: Callable[[str, str], SpeedFigures], tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match="checkout: its process ended with 7"):
        compared("v1", "US = 0.0\n")
    with pytest.raises(CommandError, match=r"other: has no US") as caught:
        compared(str(package(tmp_path / "other", "pass\n")), "US = 1.0\n")
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("free_gib", "each_gib", "processes"),
    [(139, 8, 6), (79, 8, 4), (79, 4, 6), (24, 8, 2), (0, 4, 2)],
)
def test_a_build_has_as_many_processes_as_fit_on_the_gpu(
    free_gib: int, each_gib: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (ListedGpu("0", "GPU-a", free_gib << 30), ListedGpu("1", "GPU-b", 500 << 30))
    monkeypatch.setattr(comparing, "list_gpus", lambda environ: listed)
    monkeypatch.setattr(comparing, "free_host_bytes", lambda: 100 << 30)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "GPU-a,1"}):
        assert comparing.processes_of_each(each_gib << 30, environ) == processes
    # the one that is measured on, not the first one of the machine
    assert comparing.processes_of_each(each_gib << 30, {"CUDA_VISIBLE_DEVICES": "1"}) == 6
    # each imports torch
    monkeypatch.setattr(comparing, "free_host_bytes", lambda: 13 << 30)
    assert comparing.processes_of_each(each_gib << 30, {"CUDA_VISIBLE_DEVICES": "1"}) == 4
    monkeypatch.setattr(comparing, "list_gpus", lambda environ: ())
    assert comparing.processes_of_each(each_gib << 30, {}) == 2
    monkeypatch.setattr(comparing, "list_gpus", Mock(side_effect=DriverError("it is silent")))
    assert comparing.processes_of_each(each_gib << 30, {}) == 2
