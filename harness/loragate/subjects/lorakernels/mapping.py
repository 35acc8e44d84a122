"""What all layers of a model share: the metadata of a step, and the shape of their inputs."""

from __future__ import annotations

from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.mapping import BASE_ROW
from loragate.matrix.case import Case
from lorakernels.batch.metadata import BatchMetadata


class Mapping:
    def __init__(self, case: Case, machine: Machine) -> None:
        self.metadata = BatchMetadata(
            max_tokens=case.max_tokens, max_slots=case.slots, device=machine.device
        )

    def prepare(self, token_slots: Tensor) -> None:
        # base rows at the end are declared as padding, as in a batch padded to a captured size;
        # all else is passed on, even a slot that does not exist
        used = (token_slots != BASE_ROW).nonzero()
        live = int(used.max()) + 1 if len(used) else 0
        self.metadata.prepare(token_slots[:live], num_rows=len(token_slots))


def in_dims(x: Tensor, dims: int) -> Tensor:
    """x [rows, in_features], or a view of it with one more dimension in front."""
    if dims == 2:
        return x
    count = 1 if len(x) % 2 else 2
    return x.view(count, len(x) // count, x.shape[1])
