from __future__ import annotations

import os
from pathlib import Path

import pytest

from loragate.core import host


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("200000 100000", 2)]
)
def test_a_container_grants_the_whole_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(host, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert host.usable_cores() == cores


@pytest.mark.parametrize("text", ["max 100000", ""])
def test_without_a_quota_the_scheduler_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert host.usable_cores() == 16


def test_free_memory_is_a_number_of_bytes() -> None:
    assert 1 << 20 < host.free_host_bytes() < 1 << 50
