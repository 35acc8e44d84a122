"""Products of rows with the weights of their experts: a few batched matmuls for any number of
experts. The rows of an expert are put into tiles of equal height, and each tile is a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_HEIGHT = 64
# how many elements of the weights are gathered at a time
_CHUNK = 1 << 25


class GroupedRows:
    """Rows of several experts; `experts` int64 [rows] on the rows' device."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        counts = torch.bincount(experts, minlength=num_experts)
        used = max(int(counts.count_nonzero()), 1)
        average = -(-len(experts) // used)
        self.height = min(_MAX_HEIGHT, 1 << max(average - 1, 0).bit_length())
        tiles = (counts + self.height - 1) // self.height
        self.tile_experts = torch.arange(num_experts, device=experts.device)
        self.tile_experts = self.tile_experts.repeat_interleave(tiles)
        # place[i]: the place of row i in the tiles
        order = torch.argsort(experts, stable=True)
        first = (counts.cumsum(0) - counts)[experts[order]]
        first_tile = (tiles.cumsum(0) - tiles)[experts[order]]
        within = torch.arange(len(experts), device=experts.device) - first
        self.place = torch.empty_like(order)
        self.place[order] = first_tile * self.height + within

    def times(self, rows: Tensor, weights: Tensor, *, squares: bool = False) -> Tensor:
        """[rows, N] in the dtype of `rows` [rows, K]: rows[i] @ weights[expert of i].T.
        weights [experts, N, K]; [1, N, K] where the experts share it. `squares`: of each weight."""

        def prepared(part: Tensor) -> Tensor:
            part = part.to(rows.dtype)
            return part.square() if squares else part

        if len(weights) == 1:
            return rows @ prepared(weights[0]).T
        tiles = rows.new_zeros(len(self.tile_experts) * self.height, rows.shape[1])
        tiles[self.place] = rows
        tiles = tiles.view(len(self.tile_experts), self.height, rows.shape[1])
        step = max(1, _CHUNK // max(weights[0].numel(), 1))
        products = [
            torch.bmm(part, prepared(weights[experts]).mT)
            for part, experts in zip(
                torch.split(tiles, step), torch.split(self.tile_experts, step), strict=True
            )
        ]
        return torch.cat(products).flatten(0, 1)[self.place]
