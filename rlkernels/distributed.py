"""Losses over many processes, on torch.distributed: whole weights of sharded ones, sums with gradients over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks
from rlkernels.ops.token_stats import refuse_double_backward
from rlkernels.ops.vocab_shards import VocabShard
from rlkernels.untraced import untraced


def full_weight(weight: Tensor, *, gradients: str = "mean") -> Tensor:
    """A head's whole weight or bias, of the shards that the ranks have; its gradient goes back to the shards.

        forward:  one all-gather for each sharded dimension of the mesh
        backward: one reduce-scatter for each, an all-reduce for each replicated one

    For a weight that is read where nothing has gathered it: FSDP2 gathers a module's own parameters, and those of
    modules inside it that are not sharded apart, for its `forward`; a loss made there needs nothing else. Call it once
    for a loss, on every rank of the mesh; the whole weight lives until backward. `full_weight(weight.bfloat16())`
    gathers and reduces in bfloat16, which FSDP2's mixed precision does in hooks that are passed by here.

    ZeRO-3 keeps its shards to itself and is refused; it gathers a head for the forward of the module that makes the
    loss, and for its backward, after `deepspeed.zero.register_external_parameter(module, head.weight)`.

    Args:
        weight: a `DTensor`, of any placements; any other tensor is returned as it is.
        gradients: `"mean"` averages the gradients of the mesh's ranks, as FSDP2 does, `"sum"` adds them.

    Returns:
        A plain tensor of `weight`'s whole shape, in its dtype.

    Raises:
        TypeError, ValueError: no tensor, an unknown `gradients`, a parameter that ZeRO-3 has partitioned.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        >>> from rlkernels.distributed import full_weight
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sharded = distribute_tensor(torch.eye(3), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        >>> full_weight(sharded).sum().backward()
        >>> type(sharded.grad).__name__, sharded.grad.placements
        ('DTensor', (Shard(dim=0),))
        >>> dist.destroy_process_group()
    """
    checks.require_choice("gradients", gradients, ("mean", "sum"))
    if not checks.is_dtensor(weight):
        checks.require_tensor("weight", weight)
        return weight
    from torch.distributed.tensor import Partial  # torch.distributed may not be built in

    sharded: Any = weight
    placement = Partial("avg" if gradients == "mean" else "sum")
    whole: Tensor = sharded.full_tensor(grad_placements=[placement] * sharded.device_mesh.ndim)
    return whole


def _refuse_double_backward(group: str) -> None:
    """An all-reduce in a backward is in no graph: second derivatives would lack the other ranks'."""
    refuse_double_backward(group, "compute without it")


class GatheredColumns(torch.autograd.Function):
    """`[N, columns of a shard]` -> `[N, V]`: plain PyTorch's way to a whole row, for the reference backend."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: VocabShard) -> Tensor:
        ctx.columns = slice(shard.start, shard.start + part.shape[-1])
        whole = part.new_zeros(*part.shape[:-1], shard.vocab)
        whole[..., ctx.columns] = part
        return shard.sum(whole)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        _refuse_double_backward("tp_group")
        return dwhole[..., ctx.columns], None


class SharedByShards(torch.autograd.Function):
    """The identity, of what every rank has alike; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor) -> tuple[Tensor, None]:
        _refuse_double_backward("tp_group")
        return ctx.shard.sum(dvalues.clone(memory_format=torch.contiguous_format)), None


class _SumOverRanks(torch.autograd.Function):
    """The ranks' sum, on every rank. Each rank's loss depends on it, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None]:
        _refuse_double_backward("cp_group")
        return _summed(dsum, ctx.group), None


class _TotalOfShares(torch.autograd.Function):
    """The ranks' sum in value; a rank's gradient is that of its own share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(share, group)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        _refuse_double_backward("cp_group")
        return dtotal, None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@untraced
def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Of what a sequence's parts add up to, before it enters every rank's loss."""
    total: Tensor = values if group is None else _SumOverRanks.apply(values, group)
    return total


@untraced
def total_of_shares(share: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A loss of which every rank has made its share."""
    total: Tensor = share if group is None else _TotalOfShares.apply(share, group)
    return total
