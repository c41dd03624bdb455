"""Cases of `test_distributed.py`: this package inside of models as PyTorch and PEFT wrap them."""

from __future__ import annotations

import torch
from ranks import SEQUENCES, VOCAB, case, close, columns_of, drawn, whole_batch
from torch import Tensor

import rlkernels
from rlkernels import PolicyBatch


class TinyPolicy(torch.nn.Module):
    """The loss is made inside `forward`, where the hooks of DDP and FSDP see the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6, dtype=torch.float64)
        self.head = torch.nn.Parameter(drawn(VOCAB, 6, dtype=torch.float64, seed=1))
        with torch.no_grad():
            self.body.weight.copy_(0.2 * drawn(6, 6, dtype=torch.float64, seed=3))
            self.body.bias.zero_()

    def forward(self, inputs: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return rlkernels.linear_policy_loss(self.body(inputs), self.head, batch, "dapo", normalizer=normalizer).loss


@case
def case_B90_a_module_under_ddp(rank: int, world: int) -> None:
    batch, inputs, _ = whole_batch(torch.float64)
    counts = SEQUENCES[world][0]
    own = columns_of(rank, counts)
    part = PolicyBatch(**{name: value[own] for name, value in batch.items()})
    alone, model = TinyPolicy(), torch.nn.parallel.DistributedDataParallel(TinyPolicy())
    tokens = PolicyBatch(**batch).mask.sum()
    alone(inputs, PolicyBatch(**batch), tokens).backward()
    model(inputs[own], part, rlkernels.global_normalizer(part, "token_mean")).backward()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        close(parameter.grad, expected.grad)
