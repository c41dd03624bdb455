"""Sizes that only a GPU has, for each of its backends. `pytest -m gpu` runs these; see `test_cases_gpu.py` too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import rlkernels
from rlkernels import PolicyBatch, backends, reference
from rlkernels.credit import prefix_set_counts
from rlkernels.stats import token_stats

IGNORE = -100
pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "cuda"], autouse=True)
def backend(request: pytest.FixtureRequest, select_backend: Callable[[str], str]) -> str:
    return select_backend(request.param)


def assert_equal_bits(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("objective", ["dapo", "gspo"], ids=["single sweep", "two sweeps"])
def test_loss_of_more_than_two_to_the_31_logits(objective: str) -> None:
    n, vocab, last = 14200, 151936, 3
    logits = torch.zeros(n, vocab, device="cuda", dtype=torch.bfloat16)
    logits[-last:] = torch.randn(last, vocab, device="cuda")
    targets = torch.randint(vocab, (n,), device="cuda")
    borders = torch.tensor([0, n - last, n], device="cuda")
    advantages = torch.tensor([0.0, 1.0], device="cuda")

    def loss_and_gradient(
        logits: Tensor, targets: Tensor, borders: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        leaf = logits.requires_grad_()
        old_logp = token_stats(leaf.detach(), targets).logp - 0.0001
        batch = PolicyBatch(targets, advantages, old_logp=old_logp, cu_seqlens=borders)
        loss = rlkernels.policy_loss(leaf, batch, objective, reduction="token_sum").loss
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    loss, dlogits = loss_and_gradient(logits, targets, borders, advantages)
    # few rows are split, so that their coefficients come from another kernel
    alone = torch.tensor([0, last], device="cuda")
    expected_loss, expected = loss_and_gradient(logits.detach()[-last:].clone(), targets[-last:], alone, advantages[1:])
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(dlogits[-last:], expected)
    assert (dlogits[:-last] == 0).all()


@pytest.mark.parametrize(
    "vocab, dtype",
    [
        (24_000, torch.bfloat16),  # with what the kernel has of its own, over 48 KiB of shared memory
        (12_000, torch.float32),
        (114_000, torch.bfloat16),  # nearly all of an H100's
        (151_936, torch.bfloat16),  # does not fit
    ],
)
def test_single_sweep_of_any_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    n = 4 * torch.cuda.get_device_properties("cuda").multi_processor_count  # not split
    logits = (4 * torch.randn(n, vocab, device="cuda")).to(dtype)
    targets = torch.randint(vocab, (n,), device="cuda")
    batch = PolicyBatch(targets, torch.randn(n, device="cuda"), old_logp=token_stats(logits, targets).logp - 0.1)

    def loss_and_gradient(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = rlkernels.policy_loss(leaf, batch, "dapo").loss
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    loss, dlogits = loss_and_gradient(logits)
    backends.set_backend("reference")
    exact_loss, exact = loss_and_gradient(logits.float())
    torch.testing.assert_close(loss, exact_loss, rtol=1e-4, atol=1e-5)
    assert (dlogits.float() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_threads_launch_with_different_vocabularies() -> None:
    """Each asks for as much shared memory as its own rows need."""

    def repeatedly(vocab: int) -> None:
        for _ in range(50):
            logits = torch.randn(1024, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            batch = PolicyBatch(torch.zeros(1024, dtype=torch.int64, device="cuda"), torch.ones(1024, device="cuda"))
            rlkernels.policy_loss(logits, batch, "dapo").loss.backward()
        torch.cuda.synchronize()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(repeatedly, vocab) for vocab in (4_000, 32_000)]:
            done.result()


@pytest.mark.parametrize("chunk_bytes", [32 << 20, None], ids=["made again", "kept"])
def test_head_of_more_than_two_to_the_31_weights(chunk_bytes: int | None) -> None:
    n, vocab, width = 8, 270_001, 8192
    hidden = torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocab, width, device="cuda", dtype=torch.bfloat16)
    weight[-5:] = 0.05 * torch.randn(5, width, device="cuda")
    weight.requires_grad_()
    targets = torch.tensor([vocab - 1, vocab - 2, 0, 1, 5, vocab - 1, IGNORE, 7], device="cuda")
    stats = rlkernels.linear_token_stats(hidden, weight, targets, chunk_bytes=chunk_bytes)
    dhidden, dweight = torch.autograd.grad(stats.logp.sum(), [hidden, weight])

    # columns before the last five are equal: a float64 head of six, one of them standing for them all
    last = weight.detach()[-5:].double()
    leaf = hidden.detach().double().requires_grad_()
    logits = torch.cat([torch.zeros(n, 1, device="cuda"), leaf @ last.T], dim=1)
    lse = (logits + torch.tensor([vocab - 5.0, 1, 1, 1, 1, 1], device="cuda").log()).logsumexp(1)
    column = (targets - (vocab - 6)).clamp(min=0)
    logp = torch.where(targets == IGNORE, 0, logits.gather(1, column[:, None])[:, 0] - lse)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=1e-2, atol=1e-2)
    (expected,) = torch.autograd.grad(logp.sum(), leaf)
    torch.testing.assert_close(dhidden.double(), expected, rtol=5e-2, atol=5e-2)
    probs = torch.where(targets == IGNORE, 0, torch.exp(logits[:, -1] - lse).detach())
    coefficients = (targets == vocab - 1).double() - probs
    torch.testing.assert_close(dweight[-1].double(), coefficients @ hidden.double(), rtol=5e-2, atol=5e-2)


def test_prefix_counts_of_many_tokens() -> None:
    token_ids = torch.randint(2, (64 * 16, 8192), device="cuda")
    token_ids[:, :4000] = 0
    lengths = torch.randint(8193, (len(token_ids),), device="cuda")
    counts = prefix_set_counts(token_ids, lengths, 16)
    few = slice(-32, None)
    groups = torch.arange(2).repeat_interleave(16)
    assert_equal_bits(counts[few].cpu(), reference.prefix_counts(token_ids[few].cpu(), lengths[few].cpu(), groups))
