"""Record the baseline of a release of Triton that is not the installed one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from loragate.core.child_process import run_module

_INSTALL_TIMEOUT_S = 600
_RECORD_TIMEOUT_S = 900


def record_under(version: str, baseline: Path, *, everything: bool) -> None:
    """Install `version` into a folder of its own, without its dependencies, and record under it,
    with `everything` also what is unchanged.

    Raises subprocess.CalledProcessError or TimeoutExpired; both programs explain on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        install = ("install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}")
        _run("pip", *install, timeout=_INSTALL_TIMEOUT_S)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        update = ("--update", "--baseline", str(baseline), *(["--all"] if everything else []))
        _run("loragate.compile_leg", *update, timeout=_RECORD_TIMEOUT_S, PYTHONPATH=path)


def _run(module: str, *arguments: str, timeout: float, **environment: str) -> None:
    environ = {**os.environ, **environment}
    run_module(module, *arguments, env=environ, timeout=timeout, capture=False).check_returncode()
