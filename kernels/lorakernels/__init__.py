"""Multi-LoRA kernels, adapters and layers, linear and MoE. Independent of the harness.

The names of `__all__` are the public interface, docs/lorakernels.md. Each is imported when it is
first asked for: what comes from `serving` needs transformers, and all kernels need Triton. Whatever
is in the modules and not here may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lorakernels.runtime import interpreter

if TYPE_CHECKING:
    from lorakernels.adapters.adapter import Adapter as Adapter
    from lorakernels.adapters.errors import AdapterError as AdapterError
    from lorakernels.adapters.peft_folder import read_peft_folder as read_peft_folder
    from lorakernels.adapters.slots import AdapterLayer as AdapterLayer
    from lorakernels.adapters.slots import AdapterSlots as AdapterSlots
    from lorakernels.batch.metadata import BatchMetadata as BatchMetadata
    from lorakernels.common.quantised import Quantised as Quantised
    from lorakernels.common.quantised import quantise_rows as quantise_rows
    from lorakernels.dense.embedding import embedding_delta as embedding_delta
    from lorakernels.dense.forms import LinearForm as LinearForm
    from lorakernels.dense.ops import DenseWorkspace as DenseWorkspace
    from lorakernels.dense.ops import dense_delta as dense_delta
    from lorakernels.dense.ops import expand_from_tiles as expand_from_tiles
    from lorakernels.dense.ops import shrink_in_tiles as shrink_in_tiles
    from lorakernels.dense.ops import shrunk_shape as shrunk_shape
    from lorakernels.dense.rank_shards import RankShardedSlots as RankShardedSlots
    from lorakernels.dense.stacks import AdoptedStacks as AdoptedStacks
    from lorakernels.dense.stacks import adopt_stacks as adopt_stacks
    from lorakernels.dense.weights import LoRAFactors as LoRAFactors
    from lorakernels.dense.weights import SlotWeights as SlotWeights
    from lorakernels.gdn.forms import GDNForm as GDNForm
    from lorakernels.layers.embedding import LoRAEmbedding as LoRAEmbedding
    from lorakernels.layers.expert_placement import ExpertPlacement as ExpertPlacement
    from lorakernels.layers.gate_up import GateUp as GateUp
    from lorakernels.layers.gdn import DeltaNetHeads as DeltaNetHeads
    from lorakernels.layers.gdn import GatedDeltaNetInputProjection as GatedDeltaNetInputProjection
    from lorakernels.layers.gdn import InputModule as InputModule
    from lorakernels.layers.gdn import InputModules as InputModules
    from lorakernels.layers.linear import LoRALinear as LoRALinear
    from lorakernels.layers.moe import FusedMoELoRA as FusedMoELoRA
    from lorakernels.layers.moe_partition import MoERank as MoERank
    from lorakernels.layers.moe_scratch import MoEScratch as MoEScratch
    from lorakernels.layers.partition import LoRASharding as LoRASharding
    from lorakernels.layers.partition import Parallel as Parallel
    from lorakernels.layers.partition import Slice as Slice
    from lorakernels.layers.sharding import sharded_slots as sharded_slots
    from lorakernels.layers.warm_up import KernelVariant as KernelVariant
    from lorakernels.layers.warm_up import kernel_variants as kernel_variants
    from lorakernels.layers.warm_up import warm_up as warm_up
    from lorakernels.layers.wrapped import WrappedLoRALinear as WrappedLoRALinear
    from lorakernels.moe.align.metadata import PairMetadata as PairMetadata
    from lorakernels.moe.delta.ops import MoEWorkspace as MoEWorkspace
    from lorakernels.moe.delta.ops import moe_delta as moe_delta
    from lorakernels.moe.delta.plan import MoEPath as MoEPath
    from lorakernels.moe.layer.forms import MoEForm as MoEForm
    from lorakernels.moe.layer.types import Activation as Activation
    from lorakernels.moe.layer.types import Formula as Formula
    from lorakernels.moe.layer.types import RouterWeight as RouterWeight
    from lorakernels.moe.weights import ExpertFactors as ExpertFactors
    from lorakernels.moe.weights import ExpertWeights as ExpertWeights
    from lorakernels.runtime.collectives import Collective as Collective
    from lorakernels.runtime.collectives import GroupCollective as GroupCollective
    from lorakernels.runtime.collectives import SimulatedRanks as SimulatedRanks
    from lorakernels.serving.buffers import ServingBuffers as ServingBuffers
    from lorakernels.serving.decoder import Decoder as Decoder
    from lorakernels.serving.generation import Generation as Generation
    from lorakernels.serving.generation import Request as Request
    from lorakernels.serving.generation import generate as generate
    from lorakernels.serving.graph_runner import GraphRunner as GraphRunner
    from lorakernels.serving.inputs import InputSpec as InputSpec
    from lorakernels.serving.inputs import StepInputs as StepInputs
    from lorakernels.serving.speculation import ModelDrafts as ModelDrafts
    from lorakernels.serving.speculation import NgramDrafts as NgramDrafts

interpreter.repair()

# a module and its public names
_PUBLIC = {
    "adapters.adapter": ("Adapter",),
    "adapters.errors": ("AdapterError",),
    "adapters.peft_folder": ("read_peft_folder",),
    "adapters.slots": ("AdapterLayer", "AdapterSlots"),
    "batch.metadata": ("BatchMetadata",),
    "common.quantised": ("Quantised", "quantise_rows"),
    "dense.embedding": ("embedding_delta",),
    "dense.forms": ("LinearForm",),
    "dense.ops": (
        "DenseWorkspace",
        "dense_delta",
        "expand_from_tiles",
        "shrink_in_tiles",
        "shrunk_shape",
    ),
    "dense.rank_shards": ("RankShardedSlots",),
    "dense.stacks": ("AdoptedStacks", "adopt_stacks"),
    "dense.weights": ("LoRAFactors", "SlotWeights"),
    "gdn.forms": ("GDNForm",),
    "layers.gdn": (
        "DeltaNetHeads",
        "GatedDeltaNetInputProjection",
        "InputModule",
        "InputModules",
    ),
    "layers.embedding": ("LoRAEmbedding",),
    "layers.expert_placement": ("ExpertPlacement",),
    "layers.gate_up": ("GateUp",),
    "layers.linear": ("LoRALinear",),
    "layers.moe": ("FusedMoELoRA",),
    "layers.moe_partition": ("MoERank",),
    "layers.moe_scratch": ("MoEScratch",),
    "layers.partition": ("LoRASharding", "Parallel", "Slice"),
    "layers.sharding": ("sharded_slots",),
    "layers.warm_up": ("KernelVariant", "kernel_variants", "warm_up"),
    "layers.wrapped": ("WrappedLoRALinear",),
    "moe.align.metadata": ("PairMetadata",),
    "moe.delta.ops": ("MoEWorkspace", "moe_delta"),
    "moe.delta.plan": ("MoEPath",),
    "moe.layer.forms": ("MoEForm",),
    "moe.layer.types": ("Activation", "Formula", "RouterWeight"),
    "moe.weights": ("ExpertFactors", "ExpertWeights"),
    "runtime.collectives": ("Collective", "GroupCollective", "SimulatedRanks"),
    "serving.buffers": ("ServingBuffers",),
    "serving.decoder": ("Decoder",),
    "serving.generation": ("Generation", "Request", "generate"),
    "serving.graph_runner": ("GraphRunner",),
    "serving.inputs": ("InputSpec", "StepInputs"),
    "serving.speculation": ("ModelDrafts", "NgramDrafts"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    # found without this function from now on
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
