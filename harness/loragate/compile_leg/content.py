"""One hash of all that the compiler is given: equal contents compile to equal kernels.

A content covers the kernel as Triton's front end hands it to the compiler, with everything that it
calls and every constant that it uses, the options of its launch, the target, and the exact release
of Triton. Triton's own hash of a kernel is not used: it misses constants of other modules and
defaults of helpers. A content depends on no path, no line number and no version of Python.

Settings of the environment that reach the compiler in other ways are not part of it: while one of
them is set, no content says anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# all that Triton reads under its own prefix counts, but for where it keeps files
_HARMLESS = frozenset(
    {
        "TRITON_ALWAYS_COMPILE",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "TRITON_INTERPRET",
        # decided by this leg, whatever is set
        "TRITON_DEFAULT_FP_FUSION",
    }
)
_OTHERS = frozenset({"DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS"})


def content_of(module: Any, options: Any, target: Any) -> str:
    """The content of a kernel in Triton's first representation; empty if this Triton cannot print
    it without the places in source files, which change without the kernel."""
    import triton

    text = getattr(module, "str_nodebug", None)
    if text is None:
        return ""
    chosen = {**vars(options), "extern_libs": _libraries(vars(options).get("extern_libs", ()))}
    parts = (triton.__version__, str(target), str(sorted(chosen.items())), text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def settings_of_the_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables in `environ` that may change what the compiler makes of a kernel."""
    from triton._C import libtriton

    # those that are set among the ones that Triton itself counts as part of a kernel
    own: Mapping[str, str] = getattr(libtriton, "get_cache_invalidating_env_vars", dict)()
    found = {name for name in environ if name.startswith("TRITON_") or name in _OTHERS}
    return tuple(sorted((found | set(own)) - _HARMLESS))


def _libraries(libraries: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, _digest(path)) for name, path in libraries)


@cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
