"""Registration: what is replaced, when nothing is, and which vLLM is refused."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from loragate.core.checkout import project_root
from loragate.core.machine import select_interpreter

select_interpreter()


from lorakernels.integrations.vllm import (  # noqa: E402
    UnsupportedVllmError,
    register,
    registration,
)
from lorakernels.integrations.vllm.contract import SEAMS, WRAPPER, check_version  # noqa: E402
from lorakernels.integrations.vllm.declaration import DECLARATION  # noqa: E402
from lorakernels.integrations.vllm.tables import StepTables  # noqa: E402
from lorakernels.runtime.options import BATCH_INVARIANT, batch_invariant  # noqa: E402

OURS = "lorakernels.integrations.vllm.wrapper.LoraKernelsWrapper"


class Package:
    """Modules with every name of the table, each with the parameters that it gives."""

    def __init__(self, version: str = "0.26.0") -> None:
        self.modules: dict[str, Any] = {}
        self.logged: list[str] = []
        names = {"LoRAMappingType": Enum("LoRAMappingType", ["LANGUAGE"])}
        for seam in SEAMS:
            module = self.modules.setdefault(seam.module, ModuleType(seam.module))
            *owners, name = seam.name.split(".")
            place: Any = module
            for owner in owners:
                place = place.__dict__.setdefault(owner, None) or _class_in(place, owner)
            if seam.accepted == ("no_lora_flag_cpu",):
                from dataclasses import make_dataclass

                setattr(place, name, make_dataclass(name, ["no_lora_flag_cpu"]))
                continue
            scope: dict[str, Any] = dict(names)
            exec(f"def {name}{seam.accepted[0]}: return None", scope)
            setattr(place, name, scope[name])
        self._fill(version)

    def _fill(self, version: str) -> None:
        self.modules["vllm"] = SimpleNamespace(__version__=version)
        layer = self.modules["vllm.lora.layers.base"].BaseLayerWithLoRA
        config = self.modules["vllm.config.vllm"].VllmConfig
        runner = self.modules["vllm.v1.worker.lora_model_runner_mixin"].LoRAModelRunnerMixin

        def set_mapping(self: Any, punica_wrapper: Any) -> None:
            self.punica_wrapper = punica_wrapper

        def compute_hash(self: Any) -> str:
            return "0123456789"

        @contextmanager
        def maybe_select_dummy_loras(
            self: Any,
            lora_config: Any,
            num_scheduled_tokens: Any,
            mapping_type: Any = self.modules[
                "vllm.v1.worker.lora_model_runner_mixin"
            ].LoRAModelRunnerMixin.maybe_select_dummy_loras.__defaults__[0],
            num_sampled_tokens: Any = None,
            num_active_loras: int = 0,
        ) -> Iterator[None]:
            yield

        layer.set_mapping, config.compute_hash = set_mapping, compute_hash
        runner.maybe_select_dummy_loras = maybe_select_dummy_loras
        self.layer, self.config, self.runner = layer, config, runner

        class Platform:
            cuda = True

            def is_cuda(self) -> bool:
                return self.cuda

            @classmethod
            def get_punica_wrapper(cls) -> str:
                return WRAPPER

        self.platform = Platform()
        self.modules["vllm.platforms"] = SimpleNamespace(current_platform=self.platform)

    @property
    def names(self) -> tuple[Any, ...]:
        """What registration replaces."""
        return (
            self.layer.set_mapping,
            self.config.compute_hash,
            self.runner.maybe_select_dummy_loras,
            self.platform.get_punica_wrapper(),
        )


def _class_in(place: Any, owner: str) -> type:
    made = type(owner, (), {})
    setattr(place, owner, made)
    return made


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    return installed(Package(), monkeypatch)


def installed(package: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    for name, module in package.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(registration.SWITCH, raising=False)
    return package


def test_registration_replaces_what_the_plug_in_needs(package: Package) -> None:
    before = package.names
    register()
    assert package.platform.get_punica_wrapper() == OURS
    assert not set(before) & set(package.names)


def test_registration_again_changes_nothing(package: Package) -> None:
    register()
    once = package.names
    register()
    assert package.names == once


def test_the_switch_leaves_vllm_as_it_is(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    before = package.names
    monkeypatch.setenv(registration.SWITCH, "0")
    register()
    assert package.names == before
    monkeypatch.setenv(registration.SWITCH, "off")
    with pytest.raises(ValueError, match="LORAKERNELS_VLLM must be 0 or 1"):
        register()


def test_a_platform_without_cuda_is_left_as_it_is(package: Package) -> None:
    before = package.names
    package.platform.cuda = False
    register()
    assert package.names == before


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev", "0.26"])
def test_a_version_that_nobody_read_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(Package(version), monkeypatch)
    before = package.names
    if version == "0.26":
        return register()
    with pytest.raises(UnsupportedVllmError, match=rf"0\.26 to 0\.33 \(found {version}\)"):
        register()
    assert package.names == before


def test_versions_between_and_their_patches_are_taken() -> None:
    for version in ("0.26.0", "0.26.3", "0.29.0rc1", "0.33.2", "0.30.1+cu130"):
        check_version(version)


def changed(self: Any, y: Any, x: Any, lora_a: Any, *, buffer: int = 3) -> None:
    """A method whose parameters are not vLLM's any more."""


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_changed_signature_is_named_with_what_was_found_and_expected(
    package: Package, monkeypatch: pytest.MonkeyPatch, seam: Any
) -> None:
    before = package.names
    *owners, name = seam.name.split(".")
    place = package.modules[seam.module]
    for owner in owners:
        place = getattr(place, owner)
    monkeypatch.setattr(place, name, changed)
    after = package.names
    with pytest.raises(UnsupportedVllmError) as raised:
        register()
    message = str(raised.value)
    assert f"{seam.module}.{seam.name} must be {seam.accepted[0]}" in message
    assert "(found (self, y, x, lora_a, *, buffer=3))" in message
    assert "LORAKERNELS_VLLM=0" in message
    assert package.names == after
    assert before[3] == package.names[3]


@pytest.mark.parametrize("read", [lambda self: None, changed], ids=["read alike", "changed"])
def test_a_property_counts_as_the_function_that_it_calls(package: Package, read: Any) -> None:
    wrapper = package.modules["vllm.lora.punica_wrapper.punica_base"].PunicaWrapperBase
    wrapper.sampler_indices = property(read)
    if read is not changed:
        register()
        return
    with pytest.raises(UnsupportedVllmError, match=r"sampler_indices must be \(self\) \(found"):
        register()


def test_a_module_that_cannot_be_imported_is_refused_with_the_reason(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "vllm.lora.ops.triton_ops.lora_kernel_metadata"
    # as Python marks a module that there is not
    monkeypatch.setitem(sys.modules, module, None)
    reason = rf"found a module that cannot be imported: import of {module} halted"
    with pytest.raises(UnsupportedVllmError, match=reason):
        register()


def test_a_missing_name_is_refused(package: Package) -> None:
    del package.modules["vllm.lora.punica_wrapper.punica_gpu"].PunicaWrapperGPU.add_lora_w2
    with pytest.raises(UnsupportedVllmError, match=r"add_lora_w2.*found nothing of that name"):
        register()


def test_the_wrapper_of_another_plug_in_is_not_replaced(package: Package) -> None:
    type(package.platform).get_punica_wrapper = classmethod(lambda cls: "other.Wrapper")
    before = package.names
    with pytest.raises(UnsupportedVllmError, match=r"another plug-in.*other\.Wrapper"):
        register()
    assert package.names == before


def test_a_configuration_with_lora_has_another_key_of_compiled_graphs(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = package.config()
    config.lora_config = object()
    stock = config.compute_hash()
    register()
    ours = config.compute_hash()
    assert ours != stock
    assert len(ours) == len(stock)
    assert config.compute_hash() == ours
    monkeypatch.setattr(registration, "compile_factor", lambda: "of other operators")
    assert config.compute_hash() not in (ours, stock)
    config.lora_config = None
    assert config.compute_hash() == stock


def test_graphs_of_servers_whose_layers_all_keep_vllms_kernels_have_another_key(
    package: Package,
) -> None:
    register()
    config = package.config()
    config.lora_config = object()
    found = set()
    for is_fast in (False, True):
        config.cache_config = SimpleNamespace(kv_sharing_fast_prefill=is_fast)
        found.add(config.compute_hash())
    assert len(found) == 2


@pytest.mark.parametrize("is_fast", [False, True, None])
def test_the_wrapper_asks_the_configuration_whether_all_layers_keep_vllms_kernels(
    package: Package, monkeypatch: pytest.MonkeyPatch, kit: Any, is_fast: bool | None
) -> None:
    cache = SimpleNamespace(kv_sharing_fast_prefill=is_fast)
    # a test of one layer has none
    config = None if is_fast is None else SimpleNamespace(cache_config=cache)
    module = package.modules["vllm.config.vllm"]
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: config)
    gpu = package.modules["vllm.lora.punica_wrapper.punica_gpu"]
    monkeypatch.setattr(gpu, "PunicaWrapperGPU", kit.wrapper)
    # a module that is imported would keep what this test gave it
    source = Path(registration.__file__).with_name("wrapper.py")
    wrapper: Any = runpy.run_path(str(source))["LoraKernelsWrapper"]
    sizes = SimpleNamespace(max_loras=2, max_lora_rank=4)
    made = wrapper(8, 8, "cpu", lora_config=sizes)
    assert (made.refusal is not None) is bool(is_fast)


def factors_of_two_sources(
    module: str, monkeypatch: pytest.MonkeyPatch, package: Path
) -> list[str]:
    """The factors of a package before and after one of its modules has changed."""
    own = package / "integrations" / "vllm" / "registration.py"
    monkeypatch.setattr(registration, "__file__", str(own))
    source = package / module
    source.parent.mkdir(parents=True)
    factors = []
    for text in ("one", "two"):
        source.write_text(text)
        factors.append(registration.compile_factor())
    return factors


def test_the_factor_of_compiled_graphs_follows_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = "integrations/vllm/registration.py"
    before, after = factors_of_two_sources(module, monkeypatch, tmp_path)
    assert before != after


def test_the_factor_of_compiled_graphs_follows_all_modules_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, after = factors_of_two_sources("runtime/tuning.py", monkeypatch, tmp_path)
    assert before != after


@pytest.mark.parametrize(
    ("vllms", "own", "taken"),
    [("1", None, True), ("0", None, False), (None, None, False), ("1", "0", False)],
)
def test_vllms_promise_of_the_same_bits_in_any_batch_is_kept_unless_the_user_says_otherwise(
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    vllms: str | None,
    own: str | None,
    taken: bool,
) -> None:
    for name, value in ((registration.VLLMS_BATCH_INVARIANT, vllms), (BATCH_INVARIANT, own)):
        # so that what registration sets is taken back
        monkeypatch.setenv(name, value or "0")
        if value is None:
            monkeypatch.delenv(name)
    register()
    assert batch_invariant() is taken


def test_a_plug_in_that_is_switched_off_sets_no_option(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BATCH_INVARIANT, "0")
    monkeypatch.delenv(BATCH_INVARIANT)
    monkeypatch.setenv(registration.VLLMS_BATCH_INVARIANT, "1")
    monkeypatch.setenv(registration.SWITCH, "0")
    register()
    assert not batch_invariant()


def test_graphs_with_other_numbers_of_tables_have_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = set()
    for value in ("0", "1"):
        monkeypatch.setenv(BATCH_INVARIANT, value)
        tables = StepTables(max_tokens=8192, max_slots=2, device="cpu").tensors
        found.add((len(tables), registration.compile_factor()))
    (few, one), (many, other) = sorted(found)
    assert few < many
    assert one != other


def test_a_layer_is_adopted_when_it_gets_our_wrapper_and_not_otherwise(
    package: Package, plain: Any, kit: Any
) -> None:
    register()
    stock, ours = (kit.linear("QKVParallelLinearWithLoRA") for _ in range(2))
    for layer in (stock, ours):
        layer.set_mapping = package.layer.set_mapping.__get__(layer)
    stacks = stock.lora_a_stacked
    stock.set_mapping(wrapper := object())
    assert stock.punica_wrapper is wrapper
    assert stock.lora_a_stacked is stacks
    ours.set_mapping(plain.wrapper)
    assert ours.punica_wrapper is plain.wrapper
    assert ours.lora_a_stacked[0].stride(0) == 2 * stacks[0].stride(0)


def test_a_layer_that_is_refused_keeps_the_wrapper_of_vllm(
    package: Package, plain: Any, kit: Any
) -> None:
    register()
    refused = kit.linear("LinearOfAnotherReleaseWithLoRA")
    refused.set_mapping = package.layer.set_mapping.__get__(refused)
    stacks = refused.lora_a_stacked
    refused.set_mapping(plain.wrapper)
    assert type(refused.punica_wrapper) is type(plain.wrapper.stock)
    assert type(refused.punica_wrapper) is not type(plain.wrapper)
    assert refused.lora_a_stacked is stacks


def test_a_dummy_run_declares_its_adapters(package: Package) -> None:
    register()
    flag = torch.tensor([False])
    for adapters in (0, 2):
        with package.runner().maybe_select_dummy_loras(None, 3, num_active_loras=adapters):
            DECLARATION.mapping_installed(flag)
            assert DECLARATION.without_adapters(flag) is (adapters == 0)


def test_importing_the_package_imports_no_vllm() -> None:
    script = (
        "import sys, lorakernels.integrations.vllm as plug_in\n"
        "assert not any(name.split('.')[0] == 'vllm' for name in sys.modules)\n"
    )
    subprocess.run((sys.executable, "-c", script), check=True, timeout=300)


def declared() -> Any:
    text = (project_root() / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


@pytest.mark.parametrize("version", ["0.25.9", "0.26.0", "0.33.7", "0.34.0", "1.26.0"])
def test_the_extra_takes_the_versions_that_are_not_refused(version: str) -> None:
    (extra,) = declared()["optional-dependencies"]["vllm"]
    if version in Requirement(extra).specifier:
        check_version(version)
    else:
        with pytest.raises(UnsupportedVllmError):
            check_version(version)


def test_the_entry_point_is_declared() -> None:
    project = declared()
    assert project["entry-points"]["vllm.general_plugins"] == {
        "lorakernels": "lorakernels.integrations.vllm:register"
    }


def test_the_installed_vllm_fits_the_table(installed_layers: Any) -> None:
    from lorakernels.integrations.vllm.contract import check_seams

    check_version(installed_layers.ops.version)
    check_seams()
