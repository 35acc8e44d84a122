"""A vocabulary embedding that serves many adapters at once, one for each token of the batch.

Invariant: as in LoRALinear, the layer copies its own part of whole tensors and shares what is not
cut. A head that is tied to the embedding has adapters of its own: neither changes the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.embedding import check_id_type, embedding_delta
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers.linear import LinearAdapters
from lorakernels.layers.packing import Packing, owned, take
from lorakernels.layers.partition import Parallel, Slice, cut_layer


class LoRAEmbedding(LinearAdapters):
    """y = weight[id] + scale * B @ A[:, id], with A, B and scale of each token's slot.

    weight [vocabulary, width] is that of the whole layer. Over several ranks the vocabulary is cut
    in equal runs: the result of a rank is zero for ids of the others, and is summed over the ranks.
    An adapter has factors a [rank, vocabulary] and b [width, rank] under `name`, as PEFT has them.
    padded_vocabulary: what is cut, where the model's vocabulary cannot be. Raises ValueError.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        num_slots: int,
        rank: int,
        name: str = "embed_tokens",
        tp_size: int = 1,
        tp_rank: int = 0,
        padded_vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        if weight.dim() != 2:
            raise ValueError(f"weight must be [vocabulary, width] (got {list(weight.shape)})")
        vocabulary, width = weight.shape
        self.packing = Packing((Slice(name, width),), vocabulary, {})
        self.cut = cut_layer(
            self.packing.slices,
            vocabulary,
            parallel=Parallel.ROW,
            tp_size=tp_size,
            tp_rank=tp_rank,
            padded_in_features=padded_vocabulary,
            input_name="vocabulary",
        )
        self.adapter_cut = self.cut
        self.join(None)
        local = take(weight.detach(), self.cut.inputs, dim=0)
        self.weight = nn.Parameter(owned(local, weight), requires_grad=False)
        self.slots = SlotWeights(
            num_slots=num_slots,
            slice_widths=[width],
            in_features=self.cut.inputs.size,
            rank=rank,
            dtype=weight.dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def forward(self, ids: Tensor, metadata: BatchMetadata, workspace: DenseWorkspace) -> Tensor:
        """ids [..], int32 or int64 -> [.., width], with as many ids as `metadata` was prepared for
        rows. `workspace` is made for `slots`, and may be shared by layers that run one after the
        other. An id outside of the vocabulary gives zeros. The result has no gradient. Raises
        ValueError.
        """
        # before the look-up of rows, which would raise what it raises
        check_id_type(ids)
        flat, inputs = ids.reshape(-1), self.cut.inputs
        local = flat - inputs.start
        is_foreign = (local < 0) | (local >= inputs.live)
        out = F.embedding(local.masked_fill_(is_foreign, 0), self.weight)
        out.masked_fill_(is_foreign[:, None], 0)
        embedding_delta(flat, self.slots, metadata, workspace, out, first_id=inputs.start)
        return out.view(*ids.shape, out.shape[1])
