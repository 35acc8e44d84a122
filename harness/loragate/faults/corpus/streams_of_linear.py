"""Faults of linear layers that compute base product and shrink on two streams."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_linear = planting("lorakernels.dense.linear", Group.STREAMS)
_ops = planting("lorakernels.dense.ops", Group.STREAMS)

_FORKED = (
    "        out = fork_join(device, base, *beside, partial(delta.shrink, pdl=False), "
    "parallel=parallel)\n"
)
_EXPAND = "    delta.expand(out, pdl=pdl, behind_base=form is not LinearForm.SINGLE)\n"
_FORK = f"{_FORKED}{_EXPAND}"
_SHRINK = """    def shrink(self, *, pdl: bool) -> None:
        launch_shrink(self.x, self.slots, self.shape, self.tiles, self.shrunk, pdl=pdl)
"""
_BASE = """    def base() -> Tensor:
        return F.linear(x, weight, bias)
"""

FAULTS = (
    _linear(
        "expand-beside-the-base-product",
        _FORK,
        "        out = torch.empty_like(base())\n"
        "        fork_join(device, lambda: out.copy_(base()), *beside, "
        "lambda: (delta.shrink(pdl=False), delta.expand(out, pdl=False, behind_base=True)), "
        "parallel=parallel)\n"
        "        return out\n"
        f"{_EXPAND}",
        source="vllm #35721",
        why="Both streams write the output: the base product erases the delta, or does not.",
    ),
    _linear(
        "delta-materialised-uninitialised",
        _FORK,
        f"{_FORKED}"
        "        extra = torch.empty_like(out)\n"
        "        delta.expand(extra, pdl=pdl, behind_base=True)\n"
        "        return out.add_(extra)\n"
        f"{_EXPAND}",
        source="vllm #29316",
        why="Rows without an adapter get what the memory of the delta held before.",
    ),
    _linear(
        "input-copy-freed-while-the-side-reads",
        _SHRINK,
        "    def shrink(self, *, pdl: bool) -> None:\n"
        "        wide = self.x.clone()\n"
        "        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            launch_shrink(wide, self.slots, self.shape, self.tiles, self.shrunk, "
        "pdl=pdl)\n"
        "        del wide\n",
        source="local-inference-lab #93",
        why="A copy of the input returns to the allocator while a stream of the shrink reads it.",
    ),
    _linear(
        "input-scaled-in-place-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        out = F.linear(x.mul_(2), weight, bias)\n"
        "        x.mul_(0.5)\n"
        "        return out.sub_(bias if bias is not None else 0).mul_(0.5)"
        ".add_(bias if bias is not None else 0)\n",
        source="sglang #31870",
        why="Write after read: the main stream changes the input that the side still reads.",
    ),
    _linear(
        "output-of-the-base-allocated-on-the-side",
        _FORK,
        "        made = []\n"
        "        fork_join(device, partial(delta.shrink, pdl=False), *beside, "
        "lambda: made.append(base()), parallel=parallel)\n"
        "        out = made[0]\n"
        f"{_EXPAND}",
        source="local-inference-lab #93",
        why="The output belongs to the side stream, which reuses its memory beside its readers.",
        only=True,
    ),
    _linear(
        "shrink-output-allocated-on-the-side",
        "        launch_shrink(self.x, self.slots, self.shape, self.tiles, self.shrunk, pdl=pdl)\n",
        "        part = torch.empty_like(self.shrunk)\n"
        "        launch_shrink(self.x, self.slots, self.shape, self.tiles, part, pdl=pdl)\n"
        "        object.__setattr__(self, 'shrunk', part)\n",
        source="local-inference-lab #93",
        why="What a side allocates leaves it: freed, it is reused beside the expand that reads it.",
    ),
    _linear(
        "all-base-decides-the-fork-the-wrong-way",
        "        parallel = form is LinearForm.DUAL\n",
        "        parallel = form is LinearForm.DUAL and not runs_adapters(\n"
        "            delta.tiles.tile_rows, device\n"
        "        )\n",
        source="vllm #15090",
        why="Batches with adapters run on one stream, as only those without should.",
    ),
    _linear(
        "form-ignored",
        "        parallel = form is LinearForm.DUAL\n",
        "        parallel = form is LinearForm.AHEAD\n",
        source="vllm #34933",
        why="The dual form runs on one stream.",
    ),
    _ops(
        "branches-share-a-buffer",
        "    return buffers[number]\n",
        "    return buffers[0]\n",
        source="sglang #28091",
        why="Two branches of a fork write their shrink outputs over each other.",
    ),
    _linear(
        "expand-trusts-a-shrink-of-another-stream",
        _EXPAND,
        "    delta.expand(out, pdl=pdl, behind_base=False)\n",
        source="vllm #31777",
        why="Behind the base product, the expand reads the output before that product is done.",
    ),
    _linear(
        "mapping-tables-cleared-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        kept = num_tiles.clone()\n"
        "        num_tiles.zero_()\n"
        "        out = F.linear(x, weight, bias)\n"
        "        num_tiles.copy_(kept)\n"
        "        return out\n",
        source="sglang #26380",
        why="The main stream uses a table of the step as scratch while the side reads it.",
    ),
    _linear(
        "shrink-output-cleared-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        shrunk[0].zero_()\n"
        "        return F.linear(x, weight, bias)\n",
        source="vllm #35721",
        why="The workspace is cleared on the main stream while the side writes it.",
    ),
)
