"""The table's rows about advantages, masks and prefix sets, and about toolchains. See `small_cases`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import small_cases
import torch
from small_cases import INF, NAN, assert_bits, loss_through, on_device
from test_credit import counts_of

import rlkernels
from rlkernels import KLCov, PolicyBatch
from rlkernels.credit import (
    group_advantages,
    group_std,
    leave_one_out_advantages,
    mixed_groups,
    prefix_set_counts,
    whiten,
)

pytest_generate_tests, backend = small_cases.by_row, small_cases.backend_of_row

ROOT = Path(__file__).parents[1]


def test_B93_groups_of_one() -> None:
    groups = torch.tensor([0, 0, 1, 2])
    for ddof in (0, 1):
        alone = group_advantages(torch.tensor([0.7]), 1, ddof=ddof)
        mixed = group_advantages(torch.tensor([1.0, 0.0, 0.7, 0.2]), groups, ddof=ddof)
        assert alone.tolist() == [0.0]
        assert mixed[2:].tolist() == [0.0, 0.0] and mixed[0] == -mixed[1] != 0
    assert leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.7, 0.2]), groups).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert group_std(torch.tensor([0.7]), 1).tolist() == [0.0]
    assert mixed_groups(torch.tensor([0.7]), 1).tolist() == [False]


@pytest.mark.parametrize(("reward", "count"), [(0.2, 8), (0.1, 7), (0.7, 16)])
def test_B94_equal_rewards(reward: float, count: int) -> None:
    rewards = torch.full((count,), reward)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert (group_advantages(rewards.to(dtype), count, eps=1e-6) == 0).all()
        assert (leave_one_out_advantages(rewards.to(dtype), count) == 0).all()


def test_B96_a_reward_that_is_not_a_number() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, NAN, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]), eps=0.0)
    root = math.sqrt(0.5)
    assert advantages.tolist() == pytest.approx([root, -root, 0.0, root, -root])


def test_B97_rejected_and_repeated_rollouts() -> None:
    assert group_advantages(torch.tensor([1.0, 0.0, NAN]), 3, scale="none").tolist() == [0.5, -0.5, 0.0]
    # two rows of one rollout: advantages are formed by rollout and handed to its rows
    of_rollout = group_advantages(torch.tensor([1.0, 0.5]), 2, scale="none")
    assert of_rollout[torch.tensor([0, 0, 1])].tolist() == [0.25, 0.25, -0.25]


def test_B98_no_signal() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for scale in ("std", "none"):
        assert group_advantages(rewards, 2, scale=scale).tolist() == [0.0] * 4
    assert mixed_groups(rewards, 2).tolist() == [False] * 4


@pytest.mark.parametrize("padding", [0.0, NAN, INF, 1e30])
def test_B99_padding_is_not_whitened(padding: float) -> None:
    whitened = whiten(torch.tensor([1.0, 3.0, padding]), torch.tensor([1, 1, 0]))
    assert whitened.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0.0])


def test_B100_a_share_of_the_valid_tokens() -> None:
    """The tokens that an objective picks by rank: half of two valid ones is one, and padding is none."""
    logp = torch.tensor([[-1.0, -2.0, 0.0, 0.0]], requires_grad=True)
    for mask, drawn in (([[1, 1, 0, 0]], 1), ([[0, 0, 0, 0]], 0)):
        batch = PolicyBatch(None, torch.tensor([[0.0, 1.0, 9.0, 9.0]]), old_logp=logp - 0.5, mask=torch.tensor(mask))
        with_penalty, without = (
            rlkernels.logp_policy_loss(logp, batch, KLCov(share=0.5, penalty=penalty), reduction="none").loss
            for penalty in (1.0, 0.0)
        )
        assert ((with_penalty != without).sum(), (with_penalty != without)[0, 2:].any()) == (drawn, False)


def test_B109_the_last_token_may_be_padding(backend: str) -> None:
    """Two tokens of three are real, and the second is the padding's."""
    tokens, lengths = on_device([[5, 2, 2], [5, 2, 2]]), on_device([2, 3])
    mask = torch.arange(3, device=lengths.device) < lengths[:, None]
    assert mask[0].tolist() == [True, True, False]
    assert prefix_set_counts(tokens, lengths, 2).tolist() == [[2, 2, 1], [2, 2, 1]]
    result = loss_through("logits", [[0.0] * 3] * 2, mask=mask)
    assert (result.dlogp != 0).tolist() == [[True, True, False], [True, True, True]]


# Prefix sets


def test_P1_duplicates(backend: str) -> None:
    assert counts_of([[1, 2], [1, 2], [3]], 3) == [[2, 2], [2, 2], [1]]


def test_P2_strict_prefix(backend: str) -> None:
    assert counts_of([[1], [1, 2]], 2) == [[2], [2, 1]]


def test_P3_padding_is_a_token(backend: str) -> None:
    assert counts_of([[1], [1, 0]], 2) == [[2], [2, 1]]


def test_P4_groups_never_mix(backend: str) -> None:
    assert counts_of([[1, 2], [1, 2], [1, 2]], [7, -3, 7]) == [[2, 2], [1, 1], [2, 2]]


def test_P5_diverge_and_meet_again(backend: str) -> None:
    assert counts_of([[1, 2, 3], [1, 9, 3]], 2) == [[2, 1, 1], [2, 1, 1]]


def test_P6_ragged_groups(backend: str) -> None:
    assert counts_of([[5], [5, 6], [], [5, 6]], [0, 1, 1, 1]) == [[1], [2, 2], [], [2, 2]]
    assert counts_of([[1, 1, 1]], 1) == [[1, 1, 1]]
    assert prefix_set_counts(on_device(torch.zeros(2, 0, dtype=torch.int64)), on_device([0, 0]), 2).shape == (2, 0)
    assert prefix_set_counts(on_device(torch.zeros(0, 3, dtype=torch.int64)), on_device([0])[:0], 2).shape == (0, 3)


def test_P7_exact_identity(backend: str) -> None:
    """Equal modulo 2^32: a 32-bit hash or cast would join them."""
    assert counts_of([[1], [1 + 2**32], [2**31], [-(2**31)]], 4) == [[1], [1], [1], [1]]


def test_P8_tool_tokens_count(backend: str) -> None:
    """Tool output is part of a response's identity; that it is not trained is the loss mask's business."""
    assert counts_of([[1, 50, 2], [1, 60, 2]], 2) == [[2, 1, 1], [2, 1, 1]]
    counts = prefix_set_counts(on_device([[1, 50, 2], [1, 60, 2]]), on_device([3, 3]), 2)
    mask = [[1, 0, 1]] * 2
    weighted = loss_through("logits", [[0.0] * 3] * 2, "lambda_grpo", mask=mask, weight=1 / counts)
    small_cases.assert_values(weighted.dlogp, [[-0.125, 0.0, -0.25]] * 2)
    assert_bits(weighted.metrics["weight_mean"].float(), on_device(0.75))


# Toolchain


def test_B84_triton_runs(backend: str) -> None:
    """In the interpreter and, on a GPU, compiled by the Triton that is installed: every kernel once."""
    log_ratio = [[0.1, -0.2]]
    for objective in ("dapo", "gspo"):  # one sweep, two sweeps
        assert loss_through("logits", log_ratio, objective).loss.isfinite()
    assert counts_of([[1, 2], [1, 2]], 2) == [[2, 2], [2, 2]]


def test_B85_threads_of_a_block() -> None:
    """At most 1,024, with 64 to a warp on AMD's CDNA and 32 elsewhere."""
    configs = pytest.importorskip("rlkernels.triton_kernels.configs")
    launches = [value for value in vars(configs).values() if isinstance(value, configs.Launch)]
    launches += [
        configs.row_sweep(dtype, vocab)
        for dtype in configs.ELEMENTS_PER_THREAD
        for vocab in (1, 127, 129, 4096, 4097, 262_144)
    ]
    assert len(launches) > 20
    for launch in launches:
        assert launch.num_warps * 64 <= 1024
        assert launch.num_warps & (launch.num_warps - 1) == 0
        assert launch.block & (launch.block - 1) == 0


def test_B86_no_kernel_asks_for_a_capability() -> None:
    """No path of the dispatch needs more than an older GPU has, so that none has to be left for another."""
    files = [*(ROOT / "rlkernels").rglob("*.py"), *(ROOT / "triton_kernels").glob("*.py")]
    asks = re.compile(r"get_device_capability|compute_capability|tl\.dot\b|warpgroup|tensor_descriptor")
    assert [file.name for file in files if asks.search(file.read_text())] == []
    names = [file for file in (ROOT / "csrc" / "cuda").glob("*.cu*") if "__CUDA_ARCH__ >=" in file.read_text()]
    assert names == []
