from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from .case_texts import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a case file and returns its path, relative to the working folder."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "bad.yaml") -> Path:
        Path(name).write_text(dedent(text))
        return Path(name)

    return _write
