"""Registers, spills and shared memory of the kernels of two builds.

`python -m loragate.bench.speed.resources SM` prints those of the build that it imports, compiled
for sm_SM, as JSON. The compile leg's launches decide which kernels and specialisations there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from loragate.bench.speed.builds import PACKAGE, Build
from loragate.bench.speed.figures import ResourcePairs, pairs_of
from loragate.compile_leg import BASELINE, BaselineError
from loragate.compile_leg.baseline import Baseline, load_baseline
from loragate.compile_leg.dry_launch import ProviderError
from loragate.compile_leg.pool import compile_all
from loragate.core.child_process import run_module
from loragate.core.machine import Machine
from loragate.core.resources import Resources
from loragate.subjects.registry import SUBJECTS

_MODULE = "loragate.bench.speed.resources"
# kernel, specialisation
_Found = tuple[str, str, Resources | None]
_FOUND = TypeAdapter(list[_Found])


class _Unknown(Exception):
    """A build whose kernels cannot be compiled by this harness."""


def compare_resources(builds: Sequence[Build], machine: Machine, cache: Path) -> ResourcePairs:
    """Of the build that is compared against and of the present one, on this machine's GPU."""
    assert machine.compute_capability is not None, "only a GPU has resources"
    major, minor = machine.compute_capability
    arch = f"sm_{major}{minor}"
    try:
        before, now = (_of_build(build, f"{major}{minor}", cache) for build in builds)
    except _Unknown as error:
        return ResourcePairs(arch, problem=str(error))
    return ResourcePairs(arch, pairs_of(before, now))


def _of_build(build: Build, capability: str, cache: Path) -> list[_Found]:
    done = run_module(_MODULE, capability, env=build.environment(os.environ, cache))
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _Unknown(f"{build.name}: {''.join(last)}")
    return _FOUND.validate_json(done.stdout)


def main(capability: str) -> int:
    provider = SUBJECTS[PACKAGE].launches
    assert provider is not None, f"{PACKAGE} has launches"
    records = Baseline()
    # outside of a checkout there is no record, and every kernel is compiled
    with suppress(BaselineError):
        records = load_baseline(BASELINE)
    try:
        done = compile_all(provider, (int(capability),), records)
    except ProviderError as error:
        sys.exit(str(error))
    record = records.find(done.triton)
    found: list[_Found] = []
    for item in done.kernels:
        resources = item.resources
        if item.unchanged and record is not None:
            resources = record.entries[item.arch, item.kernel, item.specialisation]
        found.append((item.kernel, item.specialisation, resources))
    print(_FOUND.dump_json(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
