"""One process of a group whose layers are sharded by rank: BACKEND RANK SIZE STORE. It exits with 0
if its layers compute what layers do that are not cut; on a GPU also from a CUDA graph."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels import (
    BatchMetadata,
    DenseWorkspace,
    ExpertFactors,
    FusedMoELoRA,
    GateUp,
    GroupCollective,
    LoRAFactors,
    LoRALinear,
    LoRASharding,
    MoERank,
    MoEScratch,
    PairMetadata,
    Parallel,
    Slice,
)

INPUTS, SLOTS, RANK = 48, 3, 9
QKV = (Slice("q", 24), Slice("k", 16, heads=1), Slice("v", 8, heads=1))
OUT = (Slice("o", 37),)
EXPERTS, TOP_K, INNER = 4, 2, 32
STEPS = ([2, -1, 0, 0, 1, -1, 2], [0, 1, 1, 2, -1, 2, 2])


def randn(*shape: int, seed: int, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


class Layer:
    """A layer of this process's rank beside the same layer whole, with their inputs in place."""

    def __init__(self, slices: tuple[Slice, ...], parallel: Parallel, like: Tensor) -> None:
        self.parallel, self.slices = parallel, slices
        width = sum(part.width for part in slices)
        weight = randn(width, INPUTS, seed=1, like=like)
        self.whole = LoRALinear(weight, slices=slices, num_slots=SLOTS, rank=RANK)
        group = GroupCollective()
        self.own = LoRALinear(
            weight,
            slices=slices,
            num_slots=SLOTS,
            rank=RANK,
            parallel=parallel,
            tp_size=group.size,
            tp_rank=group.rank,
            sharding=LoRASharding.RANK,
            collective=group,
        )
        self.x = torch.empty(len(STEPS[0]), INPUTS).to(like)
        most = {"max_tokens": len(self.x), "max_slots": SLOTS}
        self.mapping = BatchMetadata(**most, device=like.device)
        slots = [self.own.slots, self.whole.slots]
        self.workspace = DenseWorkspace(slots, max_tokens=len(self.x))

    def prepare(self, step: int) -> None:
        """The adapters, the mapping and the input of a step."""
        for slot in range(SLOTS):
            rank = (9, 1, 4)[slot - step]
            parts = {
                part.name: LoRAFactors(
                    randn(rank, INPUTS, seed=100 * step + 10 * slot, like=self.x),
                    randn(part.width, rank, seed=100 * step + 10 * slot + 1, like=self.x),
                    0.5,
                )
                for part in self.slices
            }
            for layer in (self.own, self.whole):
                layer.load_adapter(slot, parts)
        self.x.copy_(randn(*self.x.shape, seed=step, like=self.x))
        mapping = torch.tensor(STEPS[step], dtype=torch.int32, device=self.x.device)
        self.mapping.prepare(mapping)

    def run(self) -> Tensor:
        """As a server runs it: the partial outputs of a row-parallel layer are added up."""
        inputs = self.own.cut.inputs
        out = self.own(self.x[:, inputs.start : inputs.stop], self.mapping, self.workspace)
        if self.parallel is Parallel.ROW:
            dist.all_reduce(out)
        return out

    def check(self, out: Tensor, what: str) -> None:
        want = self.whole(self.x, self.mapping, self.workspace)
        if self.parallel is Parallel.COLUMN:
            of_slices = want.split([part.width for part in self.slices], dim=1)
            pairs = zip(of_slices, self.own.cut.columns, strict=True)
            want = torch.cat([part[:, cut.start : cut.stop] for part, cut in pairs], dim=1)
        limit = 1e-4 if out.dtype is torch.float32 else 0.3
        torch.testing.assert_close(out, want, atol=limit, rtol=0.02, msg=lambda m: f"{what}: {m}")


class Experts:
    """The output of a MoE layer on this rank of a process group."""

    parallel = "experts"

    def __init__(self, like: Tensor) -> None:
        w13 = randn(EXPERTS, 2 * INNER, INPUTS, seed=1, like=like)
        w2 = randn(EXPERTS, INPUTS, INNER, seed=2, like=like)
        group, rows = GroupCollective(), len(STEPS[0])
        sizes = {"num_slots": SLOTS, "rank": RANK, "gate_up": GateUp.HALVES}
        self.whole = FusedMoELoRA(w13, w2, **sizes)
        self.own = FusedMoELoRA(
            w13,
            w2,
            **sizes,
            place=MoERank(tp_size=group.size, tp_rank=group.rank),
            sharding=LoRASharding.RANK,
            collective=group,
        )
        self.x = torch.empty(rows, INPUTS).to(like)
        self.ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=like.device)
        self.weights = torch.ones(rows, TOP_K, device=like.device)
        self.mapping = BatchMetadata(max_tokens=rows, max_slots=SLOTS, device=like.device)
        most = {"max_tokens": rows, "top_k": TOP_K}
        self.pairs = PairMetadata(
            **most, num_experts=EXPERTS, max_slots=SLOTS, device=like.device, with_base=True
        )
        self.scratch = {layer: MoEScratch([layer], **most) for layer in (self.own, self.whole)}

    def prepare(self, step: int) -> None:
        shapes = {"gate_proj": (INPUTS, INNER), "up_proj": (INPUTS, INNER)}
        shapes["down_proj"] = (INNER, INPUTS)
        for slot in range(SLOTS):
            rank, parts = (9, 1, 4)[slot - step], {}
            for part, (name, (inputs, width)) in enumerate(shapes.items()):
                seed = 100 * step + 10 * slot + 2 * part
                a = randn(EXPERTS, rank, inputs, seed=seed, like=self.x)
                b = randn(EXPERTS, width, rank, seed=seed + 1, like=self.x)
                # about as large as the base
                parts[f"experts.{name}"] = ExpertFactors(a / inputs**0.5, b, 0.5)
            for layer in (self.own, self.whole):
                layer.load_adapter(slot, parts)
        self.x.copy_(randn(*self.x.shape, seed=step, like=self.x) / INPUTS**0.5)
        order = randn(len(self.x), EXPERTS, seed=step + 1, like=self.x).argsort(1)
        self.ids.copy_(order[:, :TOP_K])
        mapping = torch.tensor(STEPS[step], dtype=torch.int32, device=self.x.device)
        self.mapping.prepare(mapping)

    def run(self) -> Tensor:
        out = self._apply(self.own)
        dist.all_reduce(out)
        return out

    def check(self, out: Tensor, what: str) -> None:
        want = self._apply(self.whole)
        limit = (1e-4 if out.dtype is torch.float32 else 0.03) * float(want.abs().max())
        torch.testing.assert_close(out, want, atol=limit, rtol=0.02, msg=lambda m: f"{what}: {m}")

    def _apply(self, layer: FusedMoELoRA) -> Tensor:
        step = (self.x, self.ids, self.weights, self.mapping, self.pairs)
        out: Tensor = layer(*step, self.scratch[layer])
        return out


def check_group_of_one(process: int, processes: int, like: Tensor) -> None:
    """The last process is the first one of a group of its own."""
    of_last = dist.new_group([processes - 1])
    if process != processes - 1:
        return
    group, part = GroupCollective(of_last), torch.full((2,), 3.0).to(like)
    assert (group.rank, group.size) == (0, 1)
    gathered = torch.empty(1, 2).to(like)
    group.all_gather(part, gathered)
    group.all_reduce(part)
    assert part.tolist() == gathered[0].tolist() == [3, 3]


def main(backend: str, rank: int, size: int, store: str) -> None:
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    like = torch.empty(0, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    check_group_of_one(rank, size, like)
    layers = (
        Layer(QKV, Parallel.COLUMN, like),
        Layer(OUT, Parallel.ROW, like),
        Experts(like),
    )
    for layer in layers:
        what = layer.parallel
        layer.prepare(0)
        # compiles, and sets NCCL up
        layer.check(layer.run(), f"{what}, step 0")
        if not on_gpu:
            continue
        graph = torch.cuda.CUDAGraph()
        # the watchdog of NCCL calls CUDA in a thread of its own
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer.run()
        for step in (1, 0):
            layer.prepare(step)
            graph.replay()
            layer.check(out, f"{what}, replay of step {step}")
        # a graph must be gone before its communicator is
        del graph
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
