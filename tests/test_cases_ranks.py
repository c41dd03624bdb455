"""The table's rows about ranks, by two processes on the CPU. See `small_cases`; `test_distributed.py` goes further."""

from __future__ import annotations

import datetime
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_cases
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_cases import BACKENDS, IGNORE, NOT_APPLICABLE, assert_values
from torch import Tensor

import rlkernels
from rlkernels import PolicyBatch, global_normalizer, linear_policy_loss, linear_token_stats, policy_loss, token_stats

pytest_generate_tests, backend = small_cases.by_row_on_the_cpu, small_cases.backend_of_row

WORLD = 2
HERE = [name for name in BACKENDS if name not in NOT_APPLICABLE["B90"]]


def mean_over_ranks(values: list[list[float]], mask: Tensor) -> Tensor:
    """Of the losses of tokens with these values, under the normaliser of all ranks."""
    batch = PolicyBatch(torch.zeros(mask.shape, dtype=torch.int64), -torch.tensor(values), mask=mask)
    normalizer = global_normalizer(mask, "token_mean")
    loss = policy_loss(torch.zeros(*mask.shape, 2), batch, "dapo", normalizer=normalizer).loss
    dist.all_reduce(loss)
    return loss / WORLD


def equal_losses(rank: int) -> None:
    """B56."""
    assert_values(mean_over_ranks([[1.0] * 3] * 4, torch.ones(4, 3)), 1.0)


def unequal_ranks(rank: int) -> None:
    """B57: three tokens that sum to 3, one of 4."""
    values, mask = ([[1.0, 1.0, 1.0]], [[1, 1, 1]]) if rank == 0 else ([[4.0, 0.0, 0.0]], [[1, 0, 0]])
    assert_values(mean_over_ranks(values, torch.tensor(mask)), 1.75)


def shards_of_a_bias(rank: int) -> None:
    """B74: hidden states 0, bias [0, ln 3] in two shards of one column, target 1."""
    bias = torch.tensor([[0.0], [math.log(3)]][rank]).requires_grad_()
    logp = linear_token_stats(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([1]), bias=bias, tp_group=whole()).logp
    assert_values(logp, [-0.287682])
    assert_values(torch.autograd.grad(logp.sum(), bias)[0], [(-0.25, 0.25)[rank]])


def gradient_of_each_shard(rank: int) -> None:
    """B77: four columns of zeros in two shards, target 0."""
    expected = [[0.75, -0.25], [-0.25, -0.25]][rank]
    shard = torch.zeros(1, 2, requires_grad=True)
    logp = token_stats(shard, torch.tensor([0]), tp_group=whole()).logp
    assert_values(logp, [-math.log(4)])
    assert_values(torch.autograd.grad(logp.sum(), shard)[0], [expected])
    weight, hidden = torch.zeros(2, 1, requires_grad=True), torch.ones(1, 1)
    logp = linear_token_stats(hidden, weight, torch.tensor([0]), tp_group=whole()).logp
    assert_values(torch.autograd.grad(logp.sum(), weight)[0][:, 0], expected)
    batch = PolicyBatch(torch.tensor([0]), torch.tensor([1.0]))
    for loss, leaf in (
        (policy_loss(shard, batch, tp_group=whole()).loss, shard),
        (linear_policy_loss(hidden, weight, batch, tp_group=whole()).loss, weight),
    ):
        assert_values(torch.autograd.grad(-loss, leaf)[0].flatten(), expected)


def whole_vocabulary_on_every_rank(rank: int) -> None:
    """B78: eight columns of zeros on both ranks, each said to begin at 0."""
    targets = torch.tensor([3])
    with pytest.raises(ValueError, match=r"vocab_start: expected shards that adjoin, .*got columns 8 from 0"):
        token_stats(torch.zeros(1, 8), targets, vocab_start=0, tp_group=whole())
    shard = torch.zeros(1, 4)
    assert_values(token_stats(shard, targets, vocab_start=4 * rank, tp_group=whole()).logp, [-2.079442])


class Policy(torch.nn.Module):
    """A head inside of a module's forward, as DDP needs it."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.body = torch.nn.Parameter(torch.randn(4, 4, generator=draws))
        self.head = torch.nn.Parameter(torch.randn(7, 4, generator=draws))

    def forward(self, inputs: Tensor, batch: PolicyBatch, normalizer: Tensor) -> Tensor:
        return linear_policy_loss(inputs @ self.body, self.head, batch, "dapo", normalizer=normalizer).loss


def module_under_ddp(rank: int) -> None:
    """B90."""
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    targets, advantages = torch.tensor([[0, 6, 2], [3, IGNORE, 5]]), torch.tensor([1.0, -0.5])
    alone, model = Policy(), torch.nn.parallel.DistributedDataParallel(Policy())
    own = slice(rank, rank + 1)
    alone(inputs, PolicyBatch(targets, advantages), torch.tensor(5.0)).backward()
    part = PolicyBatch(targets[own], advantages[own])
    model(inputs[own], part, global_normalizer(part, "token_mean")).backward()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
        others = [torch.empty_like(parameter.grad) for _ in range(WORLD)]
        dist.all_gather(others, parameter.grad)
        assert torch.equal(*others)


CASES: dict[str, Callable[[int], None]] = {
    "B56": equal_losses,
    "B57": unequal_ranks,
    "B74": shards_of_a_bias,
    "B77": gradient_of_each_shard,
    "B78": whole_vocabulary_on_every_rank,
    "B90": module_under_ddp,
}


def whole() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout)
    for row, function in CASES.items():
        for name in HERE:
            try:
                rlkernels.set_backend(name)
                function(rank)
                results[rank, row, name] = ""
            except BaseException:
                results[rank, row, name] = traceback.format_exc()
                raise  # the ranks are no longer at the same collective
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, str]]:
    """What each rank says of each row: nothing, or how it failed."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        processes = mp.spawn(run_rank, (str(store), results), nprocs=WORLD, join=False)
        try:
            while not processes.join():
                pass
        except mp.ProcessRaisedException:
            pass  # said by the row
        yield dict(results)


def assert_no_failure(outcome: dict[Any, str], row: str, *backends: str) -> None:
    for rank, name in itertools.product(range(WORLD), backends):
        assert outcome.get((rank, row, name), "not run: an earlier one failed") == ""


def test_B56_ranks(outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B56", *HERE)


def test_B57_ranks(outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B57", *HERE)


def test_B74_shards(outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B74", *HERE)


def test_B77_gradient_of_each_shard(backend: str, outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B77", backend)


def test_B78_whole_vocabulary_on_every_rank(backend: str, outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B78", backend)


def test_B90_module_under_ddp(backend: str, outcome: dict[Any, str]) -> None:
    assert_no_failure(outcome, "B90", backend)
