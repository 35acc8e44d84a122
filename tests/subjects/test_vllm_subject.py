from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, detect_machine, select_interpreter
from loragate.inputs.batch import make_batch
from loragate.inputs.draw import DataKind
from loragate.inputs.pool import make_pool
from loragate.matrix.case import Case, Dtype, Execution, Layout, Site
from loragate.protocol import Capabilities, Pool, unsupported
from loragate.subjects.vllm import package as vllm_package
from loragate.subjects.vllm.package import (
    VllmOps,
    fold_scale,
    installed_version,
    load_vllm,
)
from loragate.subjects.vllm.subject import VllmInstance, VllmSubject

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)


def small_case(**changes: Any) -> Case:
    axes: dict[str, Any] = {
        "site": Site.DENSE_DELTA,
        "tokens": 6,
        "in_features": 32,
        "slices": (24, 16),
        "rank": 8,
        "slots": 2,
        "dtype": Dtype.FP16,
    }
    return Case(**(axes | changes))


def golden(case: Case, pool: Pool, x: Tensor, token_slots: Tensor, out: Tensor) -> Tensor:
    result = out.double()
    for row, slot in enumerate(token_slots.tolist()):
        if slot >= 0:
            parts = zip(pool.a[slot].double(), pool.b, pool.scales[slot], strict=True)
            shrunk = [(scale, b[slot].double(), a @ x[row].double()) for a, b, scale in parts]
            result[row] += torch.cat([scale * (b @ rank) for scale, b, rank in shrunk])
    return result


class RecordingMeta:
    """A substitute for vLLM's kernel metadata: keeps the mapping and passes it to the operators."""

    def __init__(self, max_loras: int, max_tokens: int, device: str) -> None:
        self.max_loras, self.max_tokens, self.device = max_loras, max_tokens, device
        self.mapping = torch.empty(0)

    @classmethod
    def make(cls, max_loras: int, max_tokens: int, device: str) -> RecordingMeta:
        return cls(max_loras, max_tokens, device)

    def prepare_tensors(self, mapping: Tensor) -> None:
        self.mapping = mapping

    def meta_args(self, tokens: int, specialize: bool) -> tuple[Tensor]:
        assert not specialize
        return (self.mapping[:tokens],)


def torch_shrink(x: Tensor, a: list[Tensor], out: Tensor, mapping: Tensor, scale: float) -> None:
    out.zero_()
    for row, slot in enumerate(mapping.tolist()):
        for index, weight in enumerate(a):
            if slot >= 0:
                out[index, row] = scale * (weight[slot, 0].float() @ x[row].float())


def torch_expand(
    shrunk: Tensor,
    b: list[Tensor],
    out: Tensor,
    mapping: Tensor,
    offset_start: int,
    add_inputs: bool,
) -> None:
    for row, slot in enumerate(mapping.tolist()):
        start = offset_start
        for index, weight in enumerate(b):
            width = weight.shape[2]
            if slot >= 0:
                delta = weight[slot, 0].float() @ shrunk[index, row]
                columns = slice(start, start + width)
                before = out[row, columns] if add_inputs else 0
                out[row, columns] = before + delta.to(out.dtype)
            start += width


def substitute_ops() -> VllmOps:
    return VllmOps(
        version="0",
        lora_shrink=torch_shrink,
        lora_expand=torch_expand,
        kernel_meta=RecordingMeta,
        pointer_tables=({}, {}),
        batch_invariant=False,
    )


def open_instance(case: Case, ops: VllmOps) -> VllmInstance:
    return VllmInstance(
        ops,
        num_slots=case.slots,
        slices=case.slices,
        in_features=case.in_features,
        rank=case.rank,
        max_tokens=case.tokens,
        dtype=torch.float16,
        device="cpu",
    )


def pool_of(case: Case, seed: int = 3) -> Pool:
    have = Capabilities(
        sites=frozenset(Site),
        supports={
            "dtype": frozenset(Dtype),
            "execution": frozenset(Execution),
            "rank": range(1, 513),
        },
        rank_per_slice=True,
    )
    return make_pool(case, seed, DataKind.SIGNED, CPU, have)


def test_a_loaded_pool_and_a_prepared_step_give_the_delta_of_the_pool() -> None:
    case = small_case()
    pool, batch = pool_of(case), make_batch(case, 3, 0, DataKind.SIGNED, CPU)
    instance = open_instance(case, substitute_ops())
    for slot in range(case.slots):
        instance.load(slot, pool)
    want = golden(case, pool, batch.x, batch.token_slots, batch.out)
    instance.prepare(batch.token_slots)
    torch.testing.assert_close(instance.apply(batch.x, batch.out).double(), want, atol=0.02, rtol=0)


def test_a_delta_that_is_stored_replaces_what_was_there_and_leaves_base_rows_alone() -> None:
    case = small_case()
    pool, batch = pool_of(case), make_batch(case, 3, 0, DataKind.SIGNED, CPU)
    instance = open_instance(case, substitute_ops())
    for slot in range(case.slots):
        instance.load(slot, pool)
    token_slots = torch.tensor([0, -1, 1, 1, -1, 0], dtype=torch.int32)
    instance.prepare(token_slots)
    zeros = torch.zeros_like(batch.out)
    want = golden(case, pool, batch.x, token_slots, zeros)
    stored = instance.store(batch.x, zeros.masked_fill((token_slots >= 0)[:, None], 7.0))
    torch.testing.assert_close(stored.double(), want, atol=0.02, rtol=0)


def test_a_smaller_adapter_leaves_nothing_of_its_predecessor_in_the_slot() -> None:
    case = small_case()
    used, fresh = open_instance(case, substitute_ops()), open_instance(case, substitute_ops())
    small, large = pool_of(case, seed=1), pool_of(case, seed=2)
    slot = next(s for s in range(case.slots) if min(small.ranks[s]) < case.rank)
    for weight in (*used.a, *used.b):
        weight[slot] = 7
    used.load(slot, large)
    used.load(slot, small)
    fresh.load(slot, small)
    for left, right in zip((*used.a, *used.b), (*fresh.a, *fresh.b), strict=True):
        assert torch.equal(left, right)


def test_an_unloaded_slot_is_zero_and_its_neighbour_is_not() -> None:
    case = small_case()
    pool, instance = pool_of(case), open_instance(case, substitute_ops())
    for slot in range(case.slots):
        instance.load(slot, pool)
    instance.unload(0)
    assert not any(weight[0].any() for weight in (*instance.a, *instance.b))
    assert all(weight[1].any() for weight in (instance.a[0], instance.b[0]))


def test_the_scale_is_folded_in_fp32_and_rounded_once() -> None:
    b = torch.tensor([1.0, -3.0, 0.1]).bfloat16()
    assert torch.equal(fold_scale(b, 1.3), (b.double() * 1.3).bfloat16())
    # folding in bf16 would first round the scale
    assert not torch.equal(fold_scale(b, 1.3), b * torch.tensor(1.3).bfloat16())


def test_opening_forgets_what_the_same_addresses_meant_before_and_nothing_else() -> None:
    case, ops = small_case(), substitute_ops()
    first = open_instance(case, ops)
    a_key = tuple(weight.data_ptr() for weight in first.a)
    ops.pointer_tables[0][a_key] = "stale"
    ops.pointer_tables[0][(1, 2)] = "of a captured graph"
    ops.forget(first.a, first.b)
    assert ops.pointer_tables[0] == {(1, 2): "of a captured graph"}


def test_a_pool_that_is_gone_leaves_nothing_in_the_pointer_tables() -> None:
    case, ops = small_case(), substitute_ops()
    instance = open_instance(case, ops)
    for table, weights in zip(ops.pointer_tables, (instance.a, instance.b), strict=True):
        table[tuple(weight.data_ptr() for weight in weights)] = weights[0]
    kept = weakref.ref(instance.a[0])
    del instance, weights
    assert ops.pointer_tables == ({}, {})
    assert kept() is None


def test_a_case_whose_input_is_strided_is_a_skip_with_a_reason() -> None:
    have = VllmSubject.describe(interpreted=True, batch_invariant=False)
    assert unsupported(small_case(), have) is None
    reason = unsupported(small_case(layout=Layout.COLUMN_SLICE), have)
    assert reason == "layout column_slice is not supported"


def test_compiled_kernels_promise_no_bits_unless_vllm_runs_batch_invariant() -> None:
    assert not VllmSubject.describe(interpreted=False, batch_invariant=False).deterministic
    assert VllmSubject.describe(interpreted=False, batch_invariant=True).deterministic
    assert VllmSubject.describe(interpreted=True, batch_invariant=False).deterministic


def test_the_interpreter_gets_no_more_splits_than_k_fills_and_one_that_is_empty() -> None:
    def default(operation: str, **shape: int) -> dict[str, int]:
        return {"block_m": 32, "block_k": 256, "split_k": 64}

    chosen = vllm_package.fewer_splits(default)
    assert chosen("shrink", hidden_size=100) == {"block_m": 32, "block_k": 256, "split_k": 2}
    assert chosen("shrink", hidden_size=513)["split_k"] == 4
    assert chosen("shrink", hidden_size=1 << 20)["split_k"] == 64


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in front of sys.path for a vllm of the test; an installed one cannot be found."""
    vllm_package._load.cache_clear()
    for name in [m for m in sys.modules if m == "vllm" or m.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    site = [p for p in sys.path if not (Path(p) / "vllm").is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *site])
    yield tmp_path
    for name in [m for m in sys.modules if m == "vllm" or m.startswith("vllm.")]:
        del sys.modules[name]
    vllm_package._load.cache_clear()


def test_a_missing_package_is_a_reason_that_names_what_to_install(without_vllm: Path) -> None:
    assert installed_version() is None
    assert VllmSubject().version() == "not installed"
    reason = VllmSubject().capabilities(CPU)
    assert reason == "vLLM is not installed; install the extra loragate[vllm]"


def test_a_package_that_cannot_be_imported_is_a_reason_with_its_error(
    without_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with a GPU the package is refused in the interpreter before it is imported
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (without_vllm / "vllm").mkdir()
    (without_vllm / "vllm" / "__init__.py").write_text("raise ImportError('libcudart is absent')\n")
    reason = load_vllm(CPU)
    assert isinstance(reason, str)
    assert reason.endswith("cannot be imported: ImportError: libcudart is absent")


def test_importing_the_package_does_not_change_the_environment(
    without_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    (without_vllm / "vllm").mkdir()
    (without_vllm / "vllm" / "__init__.py").write_text(
        "import os\nraise ImportError(repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    )
    if not torch.cuda.is_available():
        assert "ImportError: ''" in str(load_vllm(CPU))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_the_installed_vllm_gives_the_delta_of_the_pool() -> None:
    machine, subject, case = detect_machine(), VllmSubject(), small_case(slices=(24,))
    have = subject.capabilities(machine)
    if isinstance(have, str):
        pytest.skip(have)
    pool = make_pool(case, 3, DataKind.SIGNED, machine, have)
    batch = make_batch(case, 3, 0, DataKind.SIGNED, machine)
    instance = subject.open(case, machine, None)
    for slot in range(case.slots):
        instance.load(slot, pool)
    want = golden(case, pool, batch.x, batch.token_slots, batch.out)
    instance.prepare(batch.token_slots)
    torch.testing.assert_close(instance.apply(batch.x, batch.out).double(), want, atol=0.02, rtol=0)
