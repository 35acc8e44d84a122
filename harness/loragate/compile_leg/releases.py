"""Record the baseline of a release of Triton that is not the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_INSTALL_TIMEOUT_S = 600
_RECORD_TIMEOUT_S = 900


def record_under(version: str, baseline: Path) -> None:
    """Install `version` aside, without its dependencies, and record under it.

    Raises subprocess.CalledProcessError or TimeoutExpired; both programs say why on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        install = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
        _python(*install, f"triton=={version}", timeout=_INSTALL_TIMEOUT_S)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        update = ("-m", "loragate.compile_leg", "--update", "--baseline", str(baseline))
        _python(*update, timeout=_RECORD_TIMEOUT_S, PYTHONPATH=path)


def _python(*arguments: str, timeout: float, **environment: str) -> None:
    command = [sys.executable, *arguments]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=timeout)
