"""The wrapper class of the plug-in, imported beside fake modules of vLLM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lorakernels.integrations.vllm.adoption import refusal_of_server

_MODULE = "lorakernels.integrations.vllm.wrapper"
_FAST = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True))
_PLAIN = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))


class Given:
    """Notes what a wrapper of vLLM is made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = args, kwargs


@pytest.mark.parametrize("config", [None, _PLAIN, _FAST])
def test_a_wrapper_keeps_why_all_layers_of_its_server_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    configs, gpu = ModuleType("vllm.config.vllm"), ModuleType("punica_gpu")
    current = [config]
    configs.get_current_vllm_config_or_none = lambda: current[0]  # type: ignore[attr-defined]
    gpu.PunicaWrapperGPU = Given  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.config", "vllm.lora", "vllm.lora.punica_wrapper"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.config.vllm", configs)
    monkeypatch.setitem(sys.modules, "vllm.lora.punica_wrapper.punica_gpu", gpu)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    made: Any = importlib.import_module(_MODULE)
    monkeypatch.delitem(sys.modules, _MODULE)
    bases = made.LoraKernelsWrapper.__mro__
    # methods of the plug-in go before those of vLLM
    assert [base.__name__ for base in bases[1:3]] == ["LoraKernelsMethods", "Given"]
    monkeypatch.setattr(made.LoraKernelsMethods, "__init__", Given.__init__)
    wrapper = made.LoraKernelsWrapper(3, device="cpu")
    assert wrapper.given == ((3,), {"device": "cpu"})
    # one that is made later has a server of its own
    current[0] = _PLAIN if config is _FAST else _FAST
    assert (made.LoraKernelsWrapper(3).refusal is not None) == (config is not _FAST)
    assert wrapper.refusal == refusal_of_server(config)
    assert (wrapper.refusal is not None) == (config is _FAST)
