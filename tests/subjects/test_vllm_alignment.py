from __future__ import annotations

import torch

from loragate.subjects.vllm.alignment import align_in_torch


def test_the_substitute_for_alignment_groups_pairs_by_expert_within_each_slot() -> None:
    ids = torch.tensor([[2, 0], [0, 1], [2, 0], [1, 2]], dtype=torch.int32)
    sorted_ids, blocks = torch.full((3, 12), 99).int(), torch.full((3, 6), 99).int()
    post_pad = torch.full((3,), 99).int()
    align_in_torch(
        ids,
        torch.tensor([0, 2, 0, 1]).int(),
        3,
        2,
        3,
        12,
        6,
        sorted_ids.view(-1),
        blocks.view(-1),
        post_pad,
        torch.tensor([1, 0, 1, 0]).int(),
        torch.tensor([0, 1, 2, -1]).int(),
    )
    assert sorted_ids[0].tolist() == [1, 5, 0, 4, *[8] * 8]
    assert blocks[0].tolist() == [0, 2, -1, -1, -1, -1]
    assert sorted_ids[2].tolist() == [2, 8, 3, 8, *[8] * 8]
    assert blocks[2].tolist() == [0, 1, -1, -1, -1, -1]
    # slot 1 is disabled: nothing of it is written
    assert post_pad.tolist() == [4, 99, 4]
    assert set(sorted_ids[1].tolist()) == set(blocks[1].tolist()) == {99}


def test_the_substitute_for_alignment_leaves_out_experts_that_are_not_here() -> None:
    ids = torch.tensor([[0, 3], [1, -1], [2, 4]], dtype=torch.int32)
    sorted_ids, blocks = torch.zeros(16).int(), torch.zeros(8).int()
    post_pad = torch.zeros(1).int()
    expert_map = torch.tensor([-1, 1, -1, 0]).int()
    enabled, active = torch.ones(2).int(), torch.tensor([0, -1]).int()
    align_in_torch(ids, torch.zeros(3).int(), 4, 2, 1, 16, 8, sorted_ids, blocks, post_pad,
                   enabled, active, expert_map)  # fmt: skip
    assert sorted_ids.tolist() == [1, 6, 2, *[6] * 13]
    assert blocks.tolist() == [0, 1, *[-1] * 6]
    assert post_pad.tolist() == [4]
