"""What the CUDA kernels alone promise, run on the CPU by csrc/host_device/; what Triton's do too: test_row_kernels.py.

Of a launch: whole or split rows, threads in any order, outputs anywhere, a block's shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import host_device
import pytest
import torch
from row_cases import (
    CASES,
    CUDA,
    FEW,
    MANY,
    MANY_SEGMENTS,
    SEGMENT,
    assert_both_passes_match_the_definition,
    by_dtype,
    gaussian,
    make_rows,
    prefix_counts_by_definition,
    same_bits,
    upstream_of,
)
from test_policy_objective import OBJECTIVES, both_ways, logits_batch
from torch import Generator

import rlkernels
from rlkernels.ops.rows import Upstream


@pytest.fixture(autouse=True)
def emulated(host_device_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    host_device.use(host_device_kernels, monkeypatch)
    return host_device_kernels


@pytest.fixture(params=[MANY, FEW], ids=["whole rows", "split rows"])
def multiprocessors(request: pytest.FixtureRequest, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    host_device.use(emulated, monkeypatch, request.param)
    return request.param


@pytest.fixture(params=[0, 1, 5], ids=["forwards", "backwards", "shuffled"])
def schedule(request: pytest.FixtureRequest, emulated: Any) -> Iterator[None]:
    emulated.set_schedule(request.param)
    yield
    emulated.set_schedule(0)


@by_dtype
@pytest.mark.parametrize(
    "name", ["one segment", "segments and a column", "odd strides", "columns apart, softcap", "minus infinity"]
)
def test_bits_depend_on_neither_launch_nor_place(
    name: str,
    dtype: torch.dtype,
    multiprocessors: int,
    schedule: None,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    """Whole or split rows, threads in any order, a row alone and aligned: the same bits."""
    rows = make_rows(CASES[name](generator), dtype, "cpu")
    upstream = upstream_of(rows)
    outputs = CUDA.forward(rows)
    dlogits = CUDA.backward(rows, outputs, upstream, skew=1)  # where batches of 16 bytes begin elsewhere
    host_device.use(emulated, monkeypatch, MANY)
    emulated.set_schedule(0)
    vocab = rows.logits.shape[-1]
    for i in range(rows.targets.shape[0]):
        alone = rows._replace(
            logits=rows.logits.reshape(-1, vocab)[i].clone().view(1, 1, vocab), targets=rows.targets[i : i + 1]
        )
        expected = CUDA.forward(alone)
        for a, b in zip(outputs, expected, strict=True):
            assert same_bits(a[i : i + 1], b)
        gradient = CUDA.backward(alone, expected, Upstream(*(d[i : i + 1] for d in upstream)))
        assert same_bits(dlogits.reshape(-1, vocab)[i], gradient.view(-1))


@by_dtype
def test_more_segments_than_are_merged_at_once(dtype: torch.dtype, generator: Generator) -> None:
    rows = make_rows(gaussian(MANY_SEGMENTS, generator, 2), dtype, "cpu")
    assert_both_passes_match_the_definition(CUDA, rows)


def test_zeros_of_a_row_without_coefficients_begin_anywhere(multiprocessors: int, generator: Generator) -> None:
    rows = make_rows(gaussian(SEGMENT, generator), torch.float32, "cpu")
    outputs = CUDA.forward(rows)
    zero = torch.tensor([1.0, 0.0, 1.0])
    dlogits = CUDA.backward(rows, outputs, Upstream(zero, None, zero), skew=1)[0]
    assert dlogits.any(-1).tolist() == [True, False, True]


SHARED_BYTES = {"staged": host_device.SHARED_BYTES, "read again": 0}


@pytest.mark.parametrize("shared", SHARED_BYTES)
@pytest.mark.parametrize("vocab", [1, 37, SEGMENT, 9001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["grpo", "grpo-k3-all", "cispo-two-sided", "sapo", "nft", "reinforce-kl"])
def test_single_sweep_equals_two(
    name: str,
    dtype: torch.dtype,
    vocab: int,
    shared: str,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    host_device.use(emulated, monkeypatch, MANY, SHARED_BYTES[shared])
    rlkernels.set_backend("cuda")
    logits = (3 * torch.randn(3, 5, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    objective = dataclasses.replace(OBJECTIVES[name], entropy_coef=0.01)
    batch = logits_batch(generator, vocab)
    (one, dlogits), (two, expected) = both_ways(logits, batch, objective, temperature=0.8)
    assert torch.equal(one.loss, two.loss)
    assert torch.equal(one.logp, two.logp)
    assert torch.equal(one.entropy, two.entropy)
    assert torch.equal(dlogits, expected)
    for metric, value in two.metrics.items():
        torch.testing.assert_close(one.metrics[metric], value, rtol=0, atol=0, msg=metric)


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_single_sweep_of_any_rows(
    strided: bool,
    softcap: float | None,
    few_rows: bool,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    vocab = 40001 if few_rows else 4501
    host_device.use(emulated, monkeypatch, FEW if few_rows else MANY)
    rlkernels.set_backend("cuda")
    logits = torch.randn(3, 5, (1 + strided) * vocab, generator=generator).bfloat16()[..., :: 1 + strided]
    options = {"softcap": softcap, "logit_scale": 1.7, "temperature": torch.tensor([0.5, 1.0, 2.0])}
    (one, dlogits), (two, expected) = both_ways(logits, logits_batch(generator, vocab), "dapo", **options)
    assert torch.equal(one.loss, two.loss)
    assert torch.equal(dlogits, expected)


def test_prefix_counts_of_more_rows_than_a_block_compares_at_once(generator: Generator) -> None:
    ids = torch.randint(0, 2, (300, 5), generator=generator)
    lengths = torch.randint(0, 6, (300,), generator=generator)
    group_of = torch.zeros(300, dtype=torch.int64)
    expected = prefix_counts_by_definition(ids, lengths, group_of)
    assert CUDA.prefix_counts(ids, lengths, group_of, 1).equal(expected)
