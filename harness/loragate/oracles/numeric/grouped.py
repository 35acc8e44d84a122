"""Products of rows with the weights of their groups, such as experts: a few batched matmuls for any
number of groups. The rows of a group are put into tiles of equal height, and each tile is a matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_HEIGHT = 64
# how many elements of the weights are gathered at a time
_CHUNK = 1 << 25


class GroupedRows:
    """Rows of several groups; `groups` int64 [rows] on any device, of which that of the rows is
    `device`, or the same."""

    def __init__(self, groups: Tensor, num_groups: int, device: torch.device | None = None) -> None:
        device = device or groups.device
        # the host needs some of these numbers, and all of them are few
        groups = groups.cpu()
        counts = torch.bincount(groups, minlength=num_groups)
        used = max(int(counts.count_nonzero()), 1)
        average = -(-len(groups) // used)
        self.height = min(_MAX_HEIGHT, 1 << max(average - 1, 0).bit_length())
        tiles = (counts + self.height - 1) // self.height
        tile_groups = torch.arange(num_groups).repeat_interleave(tiles)
        # place[i]: the place of row i in the tiles
        order = torch.argsort(groups, stable=True)
        first = (counts.cumsum(0) - counts)[groups[order]]
        first_tile = (tiles.cumsum(0) - tiles)[groups[order]]
        within = torch.arange(len(groups)) - first
        place = torch.empty_like(order)
        place[order] = first_tile * self.height + within
        self.tile_groups, self.place = tile_groups.to(device), place.to(device)

    def times(self, rows: Tensor, weights: Tensor, *, squares: bool = False) -> Tensor:
        """[rows, N] in the dtype of `rows` [rows, K]: rows[i] @ weights[group of i].T.
        weights [groups, N, K]; [1, N, K] where the groups share it. `squares`: of each weight."""

        def prepared(which: Tensor | int) -> Tensor:
            part = weights[which].to(rows.dtype)
            return part.square() if squares else part

        if len(weights) == 1:
            return rows @ prepared(0).T
        return self.times_each(rows, prepared, weights[0].numel())

    def times_each(
        self, rows: Tensor, of_groups: Callable[[Tensor], Tensor], elements: int
    ) -> Tensor:
        """The same, of weights that are made as they are needed: `of_groups` gives [n, N, K] for n
        groups, of `elements` elements each."""
        tiles = rows.new_zeros(len(self.tile_groups) * self.height, rows.shape[1])
        tiles[self.place] = rows
        tiles = tiles.view(len(self.tile_groups), self.height, rows.shape[1])
        step = max(1, _CHUNK // max(elements, 1))
        products = [
            torch.bmm(part, of_groups(groups).mT)
            for part, groups in zip(
                torch.split(tiles, step), torch.split(self.tile_groups, step), strict=True
            )
        ]
        return torch.cat(products).flatten(0, 1)[self.place]
