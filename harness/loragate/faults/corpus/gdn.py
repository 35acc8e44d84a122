"""Faults of the input projections of a gated delta net: their forms, columns and 8-bit weights."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.gdn.ops", Group.DELTA_NET)
_forms = planting("lorakernels.gdn.forms", Group.DELTA_NET)
_products = planting("lorakernels.gdn.products", Group.DELTA_NET)
_layer = planting("lorakernels.layers.gdn", Group.DELTA_NET)

_JOINED = "    return add_delta(qkvz, delta, linear, ba)\n"
_OUT = "    out = x.new_empty(x.shape[0], qkvz_features + of_ba.weight.shape[0])\n"
_WRITERS = """    def qkvz() -> Tensor:
        of_qkvz.write(x, out[:, :qkvz_features])
        return out

    def ba() -> None:
        of_ba.write(x, out[:, qkvz_features:])
"""

FAULTS = (
    _ops(
        "ba-is-not-awaited",
        _JOINED,
        "    if linear is LinearForm.DUAL:\n"
        "        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            ba()\n"
        "        return add_delta(qkvz, delta, linear)\n"
        f"{_JOINED}",
        source="vllm #35721",
        why="ba has a stream that waits for nothing and that nothing waits for.",
    ),
    _ops(
        "ba-erases-its-delta",
        _JOINED,
        "    out = add_delta(qkvz, delta, linear)\n    ba()\n    return out\n",
        source="vllm #35721",
        why="The product of ba is written behind the expand, over what adapters have added.",
    ),
    _ops(
        "merged-weight-of-the-first-layer",
        "        (product,) = products\n",
        "        merged = globals().setdefault('_MERGED', {})\n"
        "        product = merged.setdefault(products[0].weight.shape, products[0])\n",
        source="vllm #39804",
        why="A merged weight is remembered by its shape: other layers and ranks use a stale one.",
    ),
    _ops(
        "one-product-beside-nothing",
        "        linear = LinearForm.SINGLE if plan is GDNForm.MERGED else LinearForm.DUAL\n",
        "        linear = LinearForm.SINGLE if plan is GDNForm.MERGED else LinearForm.AHEAD\n",
        source="vllm #34933",
        why="The form of one product on two streams runs on one.",
    ),
    _ops(
        "two-products-on-one-stream",
        "    linear = LinearForm.SINGLE if plan is GDNForm.SERIAL else LinearForm.DUAL\n",
        "    linear = LinearForm.SINGLE if len(products) == 1 else LinearForm.DUAL\n",
        source="vllm #34933",
        why="Only weights of two formats fork; all others run one after the other.",
    ),
    _ops(
        "output-allocated-by-the-side-of-ba",
        f"{_OUT}\n{_WRITERS}",
        """    made: list[Tensor] = []

    def qkvz() -> Tensor:
        of_qkvz.write(x, made[0][:, :qkvz_features])
        return made[0]

    def ba() -> None:
        made.append(x.new_empty(x.shape[0], qkvz_features + of_ba.weight.shape[0]))
        of_ba.write(x, made[0][:, qkvz_features:])
""",
        source="local-inference-lab #93",
        why="The output belongs to the stream of ba, which reuses its memory beside its readers.",
    ),
    _layer(
        "ba-begins-where-it-does-in-the-whole-layer",
        "        return out[..., : self.qkvz_features], out[..., self.qkvz_features :]\n",
        "        width = _width(self.modules_of_input.ba)\n"
        "        return out[..., : self.qkvz_features], out[..., out.shape[-1] - width :]\n",
        source="sglang #24420",
        why="On several ranks ba begins too early, by the columns that the other ranks hold.",
    ),
    _layer(
        "qkv-cut-as-one",
        '_module("in_proj_qkv", keys, keys, values)',
        '_module("in_proj_qkv", (2 * keys[0] + values[0], self.key_heads))',
        source="tensorrt-llm #8063",
        why="A rank gets a part of the packed width in place of a part of each of q, k and v.",
    ),
    _layer(
        "q-and-v-swapped",
        '_module("in_proj_qkv", keys, keys, values)',
        '_module("in_proj_qkv", values, keys, keys)',
        source="tensorrt-llm #8063",
        why="The packed columns are taken for v, k and q: ranks cut them at the wrong places.",
    ),
    _layer(
        "values-cut-by-key-heads",
        "(self._values, self.value_heads)",
        "(self._values, self.key_heads)",
        source="sglang #24420",
        why="With more ranks than key heads, ranks hold the value heads of each other.",
    ),
    _layer(
        "all-modules-get-the-scale-of-the-first",
        'cast[f"b of {name}"], found[name].scale)',
        'cast[f"b of {name}"], next(iter(found.values())).scale)',
        source="vllm #29316",
        why="The adapters of ba, and all but the first of qkvz, have the scale of another module.",
    ),
    _products(
        "scales-of-ba-begin-with-those-of-qkvz",
        "BaseProduct(self.weight[columns:], self.scales[columns:])",
        "BaseProduct(self.weight[columns:], self.scales[: -columns or None])",
        source="own",
        why="Rows of ba are multiplied by the scales of rows of qkvz.",
    ),
    _forms(
        "one-product-planned-for-two-formats",
        "        return GDNForm.DUAL if dual_stream and shape.num_rows else GDNForm.SERIAL\n",
        "        return GDNForm.DUAL if dual_stream and shape.num_rows else GDNForm.MERGED\n",
        source="own",
        why="The plan takes a form that weights of different formats cannot have.",
    ),
)
