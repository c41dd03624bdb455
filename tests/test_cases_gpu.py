"""The table's rows that only a GPU can show. `pytest -m gpu` runs these; see `small_cases`."""

from __future__ import annotations

import pytest
import small_cases
import torch
from small_cases import IGNORE, assert_bits
from torch import Tensor

import rlkernels
from rlkernels import PolicyBatch
from rlkernels.stats import token_stats

pytestmark = pytest.mark.gpu
pytest_generate_tests, backend = small_cases.by_row, small_cases.backend_of_row


def test_B02_more_than_two_to_the_31_elements(backend: str) -> None:
    logits = torch.randn(42740, 50257, device="cuda", dtype=torch.bfloat16)
    logits[-1] = 0.0
    logits[-1, 17] = 5.0
    targets = torch.full((42740,), 17, device="cuda")
    alone = token_stats(logits[-1:].clone(), targets[-1:])
    assert_bits(token_stats(logits, targets).logp[-1:], alone.logp)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_B03_backward_of_more_than_two_to_the_31_elements(layout: str, backend: str) -> None:
    shape = (65537, 32768)
    logits = torch.zeros(shape if layout == "contiguous" else shape[::-1], device="cuda", dtype=torch.float16)
    view = (logits if layout == "contiguous" else logits.T).requires_grad_()
    logp = token_stats(view, torch.zeros(65537, dtype=torch.int64, device="cuda")).logp
    (dlogits,) = torch.autograd.grad(-logp.sum(), view)
    assert dlogits[0, 0].item() == dlogits[-1, 0].item() == -1.0
    assert dlogits[-1, -1].item() == pytest.approx(1 / 32768, rel=1e-3)


@pytest.mark.parametrize("n", [2**31 // 32768 + 3, 2**32 // 32768 + 3], ids=["2^31", "2^32"])
def test_B04_last_rows_of_large_inputs(n: int, backend: str) -> None:
    logits = torch.zeros(n, 32768, device="cuda", dtype=torch.bfloat16)
    logits[-5:] = torch.randn(5, 32768, device="cuda")
    targets = torch.randint(32768, (n,), device="cuda")
    alone = token_stats(logits[-5:].clone(), targets[-5:])
    assert_bits(token_stats(logits, targets).logp[-5:], alone.logp)


@pytest.mark.parametrize("length", [65535, 65536])
def test_B05_long_sequences(length: int, backend: str) -> None:
    logits = torch.randn(1, length, 8, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(8, (1, length), device="cuda")
    half = length // 2
    parts = [token_stats(logits[:, part], targets[:, part]) for part in (slice(half), slice(half, None))]
    whole = token_stats(logits, targets)
    assert_bits(whole.logp, torch.cat([part.logp for part in parts], dim=1))
    assert_bits(whole.entropy, torch.cat([part.entropy for part in parts], dim=1))


def test_B14_bad_labels_poison_their_own_row(backend: str) -> None:
    logits = torch.randn(4, 5, device="cuda", requires_grad=True)
    logp = token_stats(logits, torch.tensor([0, -4, 5, 1], device="cuda")).logp
    assert logp.isnan().tolist() == [False, True, True, False]
    logp.sum().backward()
    assert logits.grad.isnan().all(-1).tolist() == [False, True, True, False]
    assert logits.grad[[0, 3]].isfinite().all()


def test_B80_runs_on_the_current_stream(backend: str) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        logits = torch.full((64, 32768), 1.0, device="cuda")
        logp = token_stats(logits, torch.zeros(64, dtype=torch.int64, device="cuda")).logp
    stream.synchronize()
    assert logp.tolist() == pytest.approx([-10.39720771] * 64, rel=1e-6)


def test_B88_graph_capture(backend: str) -> None:
    logits = torch.randn(64, 32003, device="cuda", requires_grad=True)
    targets = torch.randint(32003, (64,), device="cuda")

    def both_passes() -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, targets)
        return stats.logp, torch.autograd.grad(stats.logp.sum() + stats.entropy.sum(), logits)[0]

    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        both_passes()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes()
    with torch.no_grad():
        logits.normal_()
        targets.random_(32003)
        targets[::3] = IGNORE
    graph.replay()
    assert_bits(captured, both_passes())


def test_B91_peak_memory(backend: str) -> None:
    n, vocab = 4096, 151936
    logits = torch.randn(n, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (n,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stats = token_stats(logits, targets)
    (stats.logp.sum() + stats.entropy.sum()).backward()
    gradient_bytes = n * vocab * 2
    assert torch.cuda.max_memory_allocated() - before <= gradient_bytes + 2**20


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
def test_B79_outputs_lie_on_the_inputs_device(backend: str) -> None:
    logits = torch.randn(4, 300, device="cuda:1", requires_grad=True)
    targets = torch.zeros(4, dtype=torch.int64, device="cuda:1")
    out = rlkernels.policy_loss(logits, PolicyBatch(targets, torch.ones(4, device="cuda:1")), "dapo")
    out.loss.backward()
    results = (*token_stats(logits, targets)[:2], out.loss, out.logp, out.entropy, logits.grad, *out.metrics.values())
    assert {value.device for value in results} == {logits.device}


@needs_two
def test_B80_tensors_of_another_device(backend: str) -> None:
    results = []
    for name in ("cuda:0", "cuda:1"):
        logits = torch.linspace(-3, 3, 1200).view(4, 300).to(name).requires_grad_()
        logp = token_stats(logits, torch.zeros(4, dtype=torch.int64, device=name)).logp
        results.append([logp.detach().cpu(), torch.autograd.grad(logp.sum(), logits)[0].cpu()])
        assert torch.cuda.current_device() == 0
    assert_bits(*results)


def test_B81_head_and_mask_on_another_device(backend: str) -> None:
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3, device="cuda")
    with pytest.raises(ValueError, match=r"weight: expected on cpu like hidden, got .* on cuda:0"):
        rlkernels.linear_token_stats(hidden, weight, torch.tensor([0, 1]))
    batch = PolicyBatch(None, torch.ones(2), mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"mask: expected on cuda:0 like the tokens, got .* on cpu"):
        rlkernels.logp_policy_loss(torch.zeros(2, 3, device="cuda"), batch)
