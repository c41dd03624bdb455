"""Cases of `test_distributed.py`: this package inside of models as PyTorch wraps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from documents import run_code_blocks
from ranks import SEQUENCES, VOCAB, WIDTHS, case, close, columns_of, drawn, group, leaf, raised, whole_batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import rlkernels
from rlkernels import PolicyBatch
from rlkernels.distributed import full_weight


class TinyPolicy(torch.nn.Module):
    """The loss is made inside `forward`, where the hooks of DDP and FSDP see the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCAB, dtype=torch.float64)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(0.2 * drawn(*parameter.shape, dtype=torch.float64, seed=seed))

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return rlkernels.linear_policy_loss(hidden, weight, batch, "gspo", bias=bias, normalizer=normalizer).loss

    def forward(self, inputs: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return self.loss(self.body(inputs), self.head.weight, self.head.bias, batch, normalizer)


class CheckpointedPolicy(TinyPolicy):
    def loss(self, *arguments: Any) -> Tensor:
        return checkpoint(super().loss, *arguments, use_reentrant=False)


class NaivePolicy(TinyPolicy):
    """Of logits that the head's own forward makes: what a wrapper gathers anyway."""

    def forward(self, inputs: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return rlkernels.policy_loss(self.head(self.body(inputs)), batch, "gspo", normalizer=normalizer).loss


class FullWeightPolicy(TinyPolicy):
    """The head is sharded apart, and its own forward, in which FSDP2 would gather it, is not called."""

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return super().loss(hidden, full_weight(weight), full_weight(bias), batch, normalizer)


def own_part(rank: int, world: int) -> tuple[slice, PolicyBatch]:
    batch, _, _ = whole_batch(torch.float64)
    own = columns_of(rank, SEQUENCES[world][0])
    return own, PolicyBatch(**{name: value[own] for name, value in batch.items()})


def expected_gradients() -> list[Tensor]:
    """One process's, of the whole batch."""
    batch, inputs, _ = whole_batch(torch.float64)
    whole, alone = PolicyBatch(**batch), TinyPolicy()
    alone(inputs, whole, torch.tensor(7)).backward()
    return [parameter.grad for parameter in alone.parameters()]


def compare(model: torch.nn.Module, expected: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        own = parameter.grad
        close(own.full_tensor() if hasattr(own, "full_tensor") else own, gradient)


def collectives(count: CommDebugMode) -> dict[str, int]:
    return {str(name).rsplit(".", 1)[-1]: number for name, number in count.get_comm_counts().items()}


@case
def case_B90_a_module_under_ddp(rank: int, world: int) -> None:
    (own, part), (_, inputs, _) = own_part(rank, world), whole_batch(torch.float64)
    for kind in (TinyPolicy, CheckpointedPolicy):
        model = torch.nn.parallel.DistributedDataParallel(kind())
        model(inputs[own], part, rlkernels.global_normalizer(part, "seq_mean_token_mean")).backward()
        compare(model, expected_gradients())


def sharded(kind: type[TinyPolicy], world: int, **options: Any) -> Any:
    model, mesh = kind(), init_device_mesh("cpu", (world,))
    fully_shard(model.body, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@case
def case_B90_a_module_under_fsdp2(rank: int, world: int) -> None:
    """The head is gathered as often as without this package: once for both passes, with the root's parameters."""
    (own, part), (_, inputs, _) = own_part(rank, world), whole_batch(torch.float64)
    counts = []
    for kind in (NaivePolicy, TinyPolicy, CheckpointedPolicy):
        model = sharded(kind, world)
        normalizer = rlkernels.global_normalizer(part, "seq_mean_token_mean")
        with CommDebugMode() as count:
            model(inputs[own], part, normalizer).backward()
        counts.append(collectives(count))
        compare(model, expected_gradients())
    assert counts[1] == counts[0] == {"_allgather_base_": 3, "_reduce_scatter_base_": 2}
    assert counts[2] == counts[1]


@case
def a_head_that_is_sharded_apart(rank: int, world: int) -> None:
    (own, part), (_, inputs, _) = own_part(rank, world), whole_batch(torch.float64)
    normalizer = rlkernels.global_normalizer(part, "seq_mean_token_mean")
    for kind in (TinyPolicy, FullWeightPolicy):
        model, mesh = kind(), init_device_mesh("cpu", (world,))
        for module in (model.body, model.head, model):
            fully_shard(module, mesh=mesh)
        if kind is TinyPolicy:
            message = raised(lambda model=model: model(inputs[own], part, normalizer))
            assert message == "weight: expected a whole tensor, got a DTensor; see rlkernels.distributed.full_weight", (
                message
            )
            continue
        with CommDebugMode() as count:
            model(inputs[own], part, normalizer).backward()
        once_for_weight_and_bias = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert collectives(count) == {"_allgather_base_": 2, "_reduce_scatter_base_": 1, **once_for_weight_and_bias}
        compare(model, expected_gradients())


@case
def full_weights_of_any_mesh(rank: int, world: int) -> None:
    """Uneven shards, both dimensions, replicas of shards; gradients averaged or added."""
    weight = drawn(VOCAB, 6, dtype=torch.float64)
    meshes = [((world,), [Shard(0)]), ((world,), [Shard(1)])]
    if world == 4:
        meshes += [((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Shard(0)])]
    for shape, placements in meshes:
        mesh = init_device_mesh("cpu", shape)
        for gradients, divisor in (("mean", world), ("sum", 1)):
            shards = distribute_tensor(weight, mesh, placements).requires_grad_()
            whole = full_weight(shards, gradients=gradients)
            assert torch.equal(whole, weight)
            (whole * (rank + 1)).sum().backward()
            assert shards.grad.placements == tuple(placements)
            total = world * (world + 1) / 2 / divisor
            close(shards.grad.full_tensor(), torch.full_like(weight, total))
    assert full_weight(weight) is weight
    assert "gradients: expected one of 'mean', 'sum'" in raised(lambda: full_weight(weight, gradients="none"))


@case
def fsdp2_in_bfloat16(rank: int, world: int) -> None:
    """FSDP2 casts what it finds among a forward's arguments: not the floats of the batch."""
    (own, part), (_, inputs, _) = own_part(rank, world), whole_batch(torch.float64)
    model = sharded(TinyPolicy, world, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(inputs[own], part, rlkernels.global_normalizer(part, "seq_mean_token_mean")).backward()
    assert part.old_logp.dtype == torch.float64
    for parameter, gradient in zip(model.parameters(), expected_gradients(), strict=True):
        scale = 0.05 * float(gradient.abs().max())
        assert_close(parameter.grad.full_tensor(), gradient, atol=scale, rtol=0.05)


@case
def a_head_that_tensor_parallel_has_sharded(rank: int, world: int) -> None:
    batch, hidden, _ = whole_batch(torch.float64)
    alone, model, mesh = TinyPolicy(), TinyPolicy(), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model.head, mesh, ColwiseParallel())

    def loss(weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
        return rlkernels.linear_policy_loss(hidden, weight, PolicyBatch(**batch), "gspo", bias=bias, **options).loss

    loss(alone.head.weight, alone.head.bias).backward()
    shards = [parameter.to_local() for parameter in (model.head.weight, model.head.bias)]
    loss(*shards, tp_group=mesh.get_group("tp")).backward()
    for actual, expected in zip(model.head.parameters(), alone.head.parameters(), strict=True):
        close(actual.grad.full_tensor(), expected.grad)


@case
def checkpointed_shards(rank: int, world: int) -> None:
    """Backward runs forward's collectives again, on all ranks in the same order."""
    batch, hidden, weight = whole_batch(torch.float64)
    columns = columns_of(rank, WIDTHS[world][0])
    whole, head, own_hidden, shard = leaf(hidden), leaf(weight), leaf(hidden), leaf(weight[columns])

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return rlkernels.linear_policy_loss(hidden, weight, PolicyBatch(**batch), "gmpo", tp_group=group()).loss

    rlkernels.linear_policy_loss(whole, head, PolicyBatch(**batch), "gmpo").loss.backward()
    checkpoint(loss, own_hidden, shard, use_reentrant=False).backward()
    close(own_hidden.grad, whole.grad)
    close(shard.grad, head.grad[columns])


@case
def dtensors_are_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    targets = torch.zeros(2, 3, dtype=torch.int64)
    given: dict[str, Any] = {
        "logits": torch.zeros(2, 3, 5),
        "hidden": torch.zeros(2, 3, 4),
        "weight": torch.zeros(5, 4),
        "bias": torch.zeros(5),
        "logp": torch.zeros(2, 3),
        "entropy": torch.zeros(2, 3),
        "targets": targets,
        "batch": PolicyBatch(targets, torch.ones(2)),
    }
    numbers = {name: torch.ones(()) for name in ("temperature", "softcap", "logit_scale")}
    normalizer = {"normalizer": torch.ones(())}
    calls: dict[Callable[..., Any], tuple[str, ...]] = {
        rlkernels.token_stats: ("logits", "targets"),
        rlkernels.linear_token_stats: ("hidden", "weight", "targets", "bias"),
        rlkernels.policy_loss: ("logits", "batch"),
        rlkernels.linear_policy_loss: ("hidden", "weight", "batch", "bias"),
        rlkernels.logp_policy_loss: ("logp", "batch", "entropy"),
    }
    for call, names in calls.items():
        arguments = {name: given[name] for name in names}
        more = ({} if "logp" in names else numbers) | (normalizer if "batch" in names else {})
        for name in (name for name in arguments | more if name != "batch"):
            value = distribute_tensor({**arguments, **more}[name], mesh, [Replicate()])
            message = raised(lambda call=call, given={**arguments, name: value}: call(**given))
            assert message == f"{name}: expected a whole tensor, got a DTensor; see rlkernels.distributed.full_weight"
    for name in ("targets", "advantages", "old_logp"):
        tensors = {"targets": targets, "advantages": torch.ones(2), "old_logp": torch.zeros(2, 3)}
        tensors[name] = distribute_tensor(tensors[name], mesh, [Replicate()])
        assert raised(lambda tensors=tensors: PolicyBatch(**tensors)).startswith(f"{name}: expected a whole tensor")


@case
def the_documents_code(rank: int, world: int) -> None:
    """In the processes' group that there is."""
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        run_code_blocks("docs/distributed.md")
