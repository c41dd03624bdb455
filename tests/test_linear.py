"""The loss from hidden states: equal to the loss from logits, without them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from versions import traced_whole_after_2_7

import rlkernels
from rlkernels import GRPO, RECIPES, PolicyBatch, schedules
from rlkernels.ops.linear_rows import LinearRows

# 9,001 columns: two whole segments and an odd rest
VOCAB, HIDDEN = 9001, 24
ITEM = 8  # bytes of float64
ALL_ROWS, TWO_ROWS = 6 * (4096 + HIDDEN) * ITEM, 2 * (4096 + HIDDEN) * ITEM  # bytes of a tile
CHUNKS = {  # bytes of a tile, and how many of the vocabulary's columns are kept for backward
    "all-kept": (ALL_ROWS, VOCAB),
    "none-kept": (ALL_ROWS, 0),
    "some-kept": (ALL_ROWS, 4096),
    "row-blocks": (TWO_ROWS, 0),  # forward takes two rows at a time, backward narrow tiles
}


@pytest.fixture(params=CHUNKS)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    tile_bytes, kept_columns = CHUNKS[request.param]
    monkeypatch.setattr(schedules, "_TILE_BYTES", tile_bytes)
    monkeypatch.setattr(schedules, "_SLACK_BYTES", 0)
    return tile_bytes + 6 * kept_columns * ITEM


def draw(generator: Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def head(generator: Generator, dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> dict[str, Tensor]:
    return {
        "hidden": draw(generator, 2, 3, HIDDEN, dtype=dtype),
        "weight": draw(generator, vocab, HIDDEN, dtype=dtype),
        "bias": draw(generator, vocab, dtype=dtype),
    }


def batch_of(generator: Generator, vocab: int = VOCAB, **changes: Any) -> PolicyBatch:
    targets = torch.randint(0, vocab, (2, 3), generator=generator)
    targets[1, 2] = -100
    return PolicyBatch(
        targets,
        **{
            "advantages": torch.tensor([1.0, -0.7], dtype=torch.float64),
            "old_logp": -8 - torch.rand(2, 3, generator=generator, dtype=torch.float64),
            "weight": torch.rand(2, 3, generator=generator, dtype=torch.float64),
            "extras": {"success_rate": torch.tensor([0.5, 0.25], dtype=torch.float64)},
        }
        | changes,
    )


def from_logits(tensors: dict[str, Tensor], batch: PolicyBatch, *args: Any, **options: Any) -> Any:
    options.pop("chunk_bytes", None)
    return rlkernels.policy_loss(F.linear(**{"input": tensors["hidden"]} | _head(tensors)), batch, *args, **options)


def _head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": tensors["weight"], "bias": tensors["bias"]}


def from_hidden(tensors: dict[str, Tensor], batch: PolicyBatch, *args: Any, **options: Any) -> Any:
    return rlkernels.linear_policy_loss(
        tensors["hidden"], tensors["weight"], batch, *args, bias=tensors["bias"], **options
    )


def gradients(out: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.loss, list(tensors.values())))


def both_paths(*args: Any, **options: Any) -> list[Any]:
    outs = []
    for path in (from_hidden, from_logits):
        torch.manual_seed(0)  # clip_cov draws
        outs.append(path(*args, **options))
    return outs


def assert_equal_paths(tensors: dict[str, Tensor], batch: PolicyBatch, *args: Any, **options: Any) -> None:
    mine, expected = both_paths(tensors, batch, *args, **options)
    torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-9, atol=1e-9)
    needed = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    for name, actual, exact in zip(needed, gradients(mine, needed), gradients(expected, needed), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_equals_the_logits_path(name: str, frozen: bool, generator: Generator) -> None:
    tensors = head(generator)
    if frozen:
        tensors["weight"].requires_grad_(False)
        tensors["bias"].requires_grad_(False)
    normalizer = 6.0 if name == "dr_grpo" else None
    assert_equal_paths(tensors, batch_of(generator), name, temperature=0.7, normalizer=normalizer)


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "softcap"])
def test_any_chunk_on_every_backend(
    backend: str, softcap: float | None, frozen: bool, chunk_bytes: int, generator: Generator
) -> None:
    tensors = head(generator)
    tensors["weight"].requires_grad_(not frozen)
    tensors["bias"].requires_grad_(not frozen)
    assert_equal_paths(
        tensors,
        batch_of(generator),
        "gspo",
        temperature=torch.tensor([0.6, 1.4]),
        softcap=softcap,
        logit_scale=1.3,
        chunk_bytes=chunk_bytes,
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
def test_first_tiles_outside_of_the_vocabulary(frozen: bool, generator: Generator) -> None:
    """-inf in more columns than a tile has"""
    vocab, absent = 200_000, 150_000
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, 4, generator=generator, dtype=torch.float64, requires_grad=not frozen)
    bias = torch.zeros(vocab, dtype=torch.float64)
    bias[:absent] = -torch.inf
    targets = torch.tensor([absent, vocab - 1, absent + 7])
    stats = rlkernels.linear_token_stats(hidden, weight, targets, bias=bias, chunk_bytes=32 << 20)
    exact = torch.log_softmax(hidden @ weight.detach()[absent:].T, dim=-1)[range(3), targets - absent]
    (expected,) = torch.autograd.grad(exact.sum(), hidden)
    (dhidden,) = torch.autograd.grad(stats.logp.sum(), hidden)
    torch.testing.assert_close(stats.logp, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dhidden, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_formed_in_forward(
    name: str, frozen: bool, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in two parts: every recipe, entropy bonus and reduction included."""
    monkeypatch.setattr(schedules, "parts", lambda problem, sequence, device: 2)
    tensors, batch = head(generator), batch_of(generator)
    for tensor in ("weight", "bias"):
        tensors[tensor].requires_grad_(not frozen)
    options: dict[str, Any] = {"normalizer": 6.0 if name == "dr_grpo" else None, "softcap": 3.0}
    options |= {"temperature": torch.tensor([0.6, 1.4])}
    assert_equal_paths(tensors, batch, name, **options)
    bonus = dataclasses.replace(RECIPES[name].objective, entropy_coef=0.1)
    for reduction in rlkernels.REDUCTIONS[:-1]:
        options["normalizer"] = 6.0 if reduction == "seq_mean_token_sum_norm" else None
        assert_equal_paths(tensors, batch, bonus, reduction=reduction, **options)
    mine, expected = both_paths(tensors, batch, bonus)
    for metric, value in expected.metrics.items():
        torch.testing.assert_close(mine.metrics[metric], value, msg=metric)
    torch.testing.assert_close(mine.logp, expected.logp)
    torch.testing.assert_close(mine.entropy, expected.entropy)


def test_gradients_formed_in_forward_are_like_any_other(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream factors, a second backward, rounding once, fp16 and packed batches elsewhere."""
    monkeypatch.setattr(schedules, "parts", lambda problem, sequence, device: 2)
    tensors, batch = head(generator, torch.bfloat16), batch_of(generator)
    out = from_hidden(tensors, batch, "dapo")
    assert type(out.loss.grad_fn).__name__ == "GradientInForwardBackward"
    inputs = list(tensors.values())
    once = torch.autograd.grad(out.loss, inputs, retain_graph=True)
    again = torch.autograd.grad(out.loss, inputs, retain_graph=True)
    eighth = torch.autograd.grad(out.loss / 8, inputs, retain_graph=True)
    for tensor, one, two, small in zip(inputs, once, again, eighth, strict=True):
        assert one.dtype == tensor.dtype
        assert torch.equal(one, two)
        assert torch.equal(one, small * 8)
    half = {name: tensor.detach().half().requires_grad_() for name, tensor in tensors.items()}
    for call in (
        lambda: from_hidden(half, batch, "dapo"),
        lambda: from_hidden(tensors, batch, "dapo", reduction="none"),
        lambda: from_hidden(tensors, batch, lambda logp, batch: -logp),
        lambda: from_hidden(tensors, batch_of(generator, rows=torch.arange(6)), "dapo"),
    ):
        assert "GradientInForward" not in type(call().loss.grad_fn).__name__


def test_cost_model() -> None:
    """Gradient in forward where its three GEMMs outweigh float32 sums of dweight, and where it fits."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    wide = {"rows": 65536, "hidden_size": 1024, "vocab": 151936, "itemsize": 2}
    large = schedules.Problem(**wide, chunk_bytes=4 << 30)
    if schedules.has_wide_gemms(cuda):
        assert schedules.parts(large, 1024, cuda) > 1
        assert schedules.parts(large._replace(chunk_bytes=512 << 20), 1024, cuda) == 0, "does not fit"
        assert schedules.parts(large._replace(rows=8192), 1024, cuda) == 0, "all logits can be kept"
        assert schedules.parts(large, 65536, cuda) == 0, "one sequence cannot be cut"
    assert schedules.parts(large, 1024, cpu) == 0


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
def test_entropy_lse_and_logp_are_differentiable(frozen: bool, backend: str, generator: Generator) -> None:
    tensors = head(generator)
    tensors["weight"].requires_grad_(not frozen)
    tensors["bias"].requires_grad_(not frozen)
    targets = batch_of(generator).targets
    upstream = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64)

    def loss(stats: rlkernels.TokenStats) -> Tensor:
        return (torch.stack([stats.logp, stats.entropy, stats.lse]) * upstream).sum()

    outputs = rlkernels.stats.OUTPUTS
    linear = rlkernels.linear_token_stats(
        tensors["hidden"], tensors["weight"], targets, bias=tensors["bias"], softcap=4.0, outputs=outputs
    )
    logits = F.linear(tensors["hidden"], tensors["weight"], tensors["bias"])
    direct = rlkernels.token_stats(logits, targets, softcap=4.0, outputs=outputs)
    for name, actual, expected in zip(linear._fields, linear, direct, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
    needed = [tensor for tensor in tensors.values() if tensor.requires_grad]
    for actual, expected in zip(
        torch.autograd.grad(loss(linear), needed), torch.autograd.grad(loss(direct), needed), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_packed_equals_padded(generator: Generator) -> None:
    tensors, batch = head(generator), batch_of(generator)
    padded = from_hidden(tensors, batch, "gmpo")
    packed = PolicyBatch(
        batch.targets.view(-1),
        batch.advantages,
        old_logp=batch.old_logp.view(-1),
        weight=batch.weight.view(-1),
        cu_seqlens=torch.tensor([0, 3, 6]),
    )
    flat = rlkernels.linear_policy_loss(
        tensors["hidden"].view(6, HIDDEN), tensors["weight"], packed, "gmpo", bias=tensors["bias"]
    )
    torch.testing.assert_close(flat.loss, padded.loss)
    for actual, expected in zip(gradients(flat, tensors), gradients(padded, tensors), strict=True):
        torch.testing.assert_close(actual, expected)


def test_rows_that_need_nothing_are_left_out(chunk_bytes: int, generator: Generator) -> None:
    """Masked rows hold NaN: had they entered a GEMM, the weight's gradient would be NaN."""
    tensors, batch = head(generator), batch_of(generator)
    with torch.no_grad():
        tensors["hidden"][1, 2] = torch.nan
    dirty = from_hidden(tensors, batch, "dapo", chunk_bytes=chunk_bytes)
    assert all(gradient.isfinite().all() for gradient in gradients(dirty, tensors))
    with torch.no_grad():
        tensors["hidden"][1, 2] = 1.0
    some = batch_of(generator, advantages=torch.tensor([[0.0, 1.0, 0.5], [0.0, -1.0, 0.0]]))
    assert_equal_paths(tensors, some, "dapo", chunk_bytes=chunk_bytes)
    nothing = batch_of(generator, advantages=torch.zeros(2))
    assert all((gradient == 0).all() for gradient in gradients(from_hidden(tensors, nothing, "dapo"), tensors))


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
def test_only_the_rows_of_the_batch_are_projected(frozen: bool, backend: str, generator: Generator) -> None:
    """What a GPU's host is told; NaN in the rest would reach the weight's gradient if it entered a GEMM."""
    tensors, batch = head(generator), batch_of(generator)
    for name in ("weight", "bias"):
        tensors[name].requires_grad_(not frozen)
    needed = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    options: dict[str, Any] = {"temperature": torch.tensor([0.6, 1.4]), "softcap": 3.0}
    expected = gradients(from_hidden(tensors, batch, "gspo", **options), needed)
    batch.rows = batch.mask.flatten().nonzero().squeeze(1)
    with torch.no_grad():
        tensors["hidden"][1, 2] = torch.nan
    out = from_hidden(tensors, batch, "gspo", **options)
    assert out.logp[1, 2] == 0
    for actual, exact in zip(gradients(out, needed), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-14)


def test_a_trained_row_outside_rows_is_poisoned(generator: Generator) -> None:
    tensors, batch = head(generator), batch_of(generator, rows=torch.tensor([0, 2]))
    out = from_hidden(tensors, batch, "dapo")
    assert out.loss.isnan()
    assert out.logp.isnan().tolist() == [[False, True, False], [True, True, False]]


def test_rows_are_split_with_the_batch(generator: Generator) -> None:
    batch = batch_of(generator, rows=torch.tensor([0, 2, 3, 4]))
    assert [part.rows.tolist() for part in batch.split(2)] == [[0, 2], [0, 1]]
    packed = PolicyBatch(
        torch.arange(6), torch.ones(2), cu_seqlens=torch.tensor([0, 4, 6]), rows=torch.tensor([1, 3, 5])
    )
    assert [part.rows.tolist() for part in packed.split(2)] == [[1, 3], [1]]


@pytest.mark.parametrize(
    "rows, error, message",
    [
        (torch.tensor([[0]]), ValueError, r"rows.*\[M\].*\[1, 1\]"),
        (torch.tensor([0.0]), TypeError, "rows.*float32"),
        (torch.tensor([1, 0]), ValueError, r"rows.*rising.*\[1, 0\]"),
        (torch.tensor([1, 1]), ValueError, "rows.*rising"),
        (torch.tensor([6]), ValueError, r"rows.*\[0, 6\).*6"),
        (torch.tensor([-1]), ValueError, "rows.*-1"),
        ([0], TypeError, "rows.*list"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), ValueError, "rows.*cpu.*meta"),
    ],
    ids=["shape", "dtype", "falling", "repeated", "too-large", "negative", "list", "device"],
)
def test_bad_rows(rows: Any, error: type[Exception], message: str, generator: Generator) -> None:
    with pytest.raises(error, match=message):
        batch_of(generator, rows=rows)


@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
def test_where_no_host_counts_rows(
    frozen: bool, chunk_bytes: int, backend: str, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: masked rows, NaN here, stay in the GEMMs and must not be felt."""
    monkeypatch.setattr(LinearRows, "knows_counts", lambda rows: False)
    tensors = head(generator)
    for name in ("weight", "bias"):
        tensors[name].requires_grad_(not frozen)
    assert_equal_paths(tensors, batch_of(generator), "dapo", softcap=3.0, chunk_bytes=chunk_bytes)
    with torch.no_grad():
        tensors["hidden"][1, 2] = torch.nan
    out = from_hidden(tensors, batch_of(generator), "dapo")
    needed = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    assert all(gradient.isfinite().all() for gradient in gradients(out, needed))


@pytest.mark.parametrize("confident", [False, True], ids=["flat", "confident"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
@pytest.mark.parametrize("chunk", ["kept", "made-again"])
def test_error_is_that_of_naive_torch(
    chunk: str, frozen: bool, dtype: torch.dtype, confident: bool, generator: Generator
) -> None:
    """Gradients of hidden and weight against float64, at most 1.5 times naive PyTorch's of the same dtype."""
    rows, hidden_size, vocab = 64, 64, 9001
    hidden = torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    if confident:
        hidden += 26 * weight[targets]
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(not frozen)
    coefficients = torch.randn(rows, generator=generator)
    chunk_bytes = None if chunk == "kept" else rows * (4096 + hidden_size) * dtype.itemsize

    def exact_and_naive(dtype: torch.dtype) -> list[Tensor]:
        h, w = (x.detach().to(dtype).requires_grad_(x.requires_grad) for x in (hidden, weight))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logp = torch.log_softmax(h @ w.t(), dim=-1, dtype=wide).gather(-1, targets[:, None]).squeeze(-1)
        return list(torch.autograd.grad((logp * coefficients).sum(), [x for x in (h, w) if x.requires_grad]))

    stats = rlkernels.linear_token_stats(hidden, weight, targets, chunk_bytes=chunk_bytes)
    if confident:
        assert stats.logp.exp().median() > 0.99
    mine = torch.autograd.grad((stats.logp * coefficients).sum(), [x for x in (hidden, weight) if x.requires_grad])
    for name, actual, naive, exact in zip(
        ("hidden", "weight"), mine, exact_and_naive(dtype), exact_and_naive(torch.float64), strict=False
    ):
        error = (actual.double() - exact).norm().item()
        own_error = (naive.double() - exact).norm().item()
        assert error <= 1.5 * own_error, f"{name}: {error:.3e}, naive {own_error:.3e}"


def test_autocast_leaves_the_master_weights_gradient_unrounded(generator: Generator) -> None:
    """B87: float32 weights, bfloat16 GEMMs: each gradient in its input's dtype, the weight's not via bfloat16."""
    tensors = head(generator, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = from_hidden(tensors, batch_of(generator), "dapo")
    dhidden, dweight, dbias = gradients(out, tensors)
    assert (dhidden.dtype, dweight.dtype, dbias.dtype) == (torch.float32,) * 3
    nonzero = dweight[dweight != 0]
    assert not torch.equal(nonzero, nonzero.to(torch.bfloat16).float())


def test_tied_and_transposed_weights(generator: Generator) -> None:
    """B34, B103: one leaf looks tokens up and is the head; a head stored as [H, V]."""
    embedding = draw(generator, 50, HIDDEN)
    batch = batch_of(generator, vocab=50)
    tokens = torch.randint(0, 50, (2, 3), generator=generator)
    linear = rlkernels.linear_policy_loss(embedding[tokens], embedding, batch)
    naive = rlkernels.policy_loss(embedding[tokens] @ embedding.t(), batch)
    torch.testing.assert_close(
        torch.autograd.grad(linear.loss, embedding)[0], torch.autograd.grad(naive.loss, embedding)[0]
    )
    stored = embedding.detach().t().contiguous().requires_grad_()
    out = rlkernels.linear_policy_loss(embedding[tokens].detach(), stored.t(), batch)
    expected = rlkernels.policy_loss(embedding[tokens].detach() @ stored, batch)
    torch.testing.assert_close(torch.autograd.grad(out.loss, stored)[0], torch.autograd.grad(expected.loss, stored)[0])


def test_lora_gradients_reach_the_adapters(generator: Generator) -> None:
    """B33: the effective weight is no leaf."""
    base, a, b = draw(generator, 50, HIDDEN), draw(generator, 2, HIDDEN), draw(generator, 50, 2)
    base.requires_grad_(False)
    hidden, batch = draw(generator, 2, 3, HIDDEN), batch_of(generator, vocab=50)
    linear = rlkernels.linear_policy_loss(hidden, base + b @ a, batch)
    naive = rlkernels.policy_loss(hidden @ (base + b @ a).t(), batch)
    for actual, expected in zip(
        torch.autograd.grad(linear.loss, (a, b)), torch.autograd.grad(naive.loss, (a, b)), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@traced_whole_after_2_7
@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
def test_compiles_whole(frozen: bool, generator: Generator) -> None:
    tensors, batch = head(generator, torch.float32), batch_of(generator)
    tensors["weight"].requires_grad_(not frozen)
    tensors["bias"].requires_grad_(not frozen)
    needed = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    eager = from_hidden(tensors, batch, "dapo")
    compiled = torch.compile(from_hidden, fullgraph=True)(tensors, batch, "dapo")
    torch.testing.assert_close(compiled.loss, eager.loss)
    for actual, expected in zip(gradients(compiled, needed), gradients(eager, needed), strict=True):
        torch.testing.assert_close(actual, expected)


HIDDEN_STATES, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(5, 4)
PARTITIONED = torch.nn.Parameter(torch.zeros(0))
PARTITIONED.ds_shape = WEIGHT.shape  # DeepSpeed's mark
BAD_CALLS = {
    "weight-flattened": ({"weight": WEIGHT.view(-1)}, ValueError, r"weight.*\[V, H\].*\[20\]"),
    "weight-freed": ({"weight": torch.zeros(0)}, ValueError, r"weight.*\[V, H\].*\[0\]"),
    "weight-of-zero3": ({"weight": PARTITIONED}, ValueError, "weight.*ZeRO-3.*rlkernels.distributed.full_weight"),
    "weight-swapped": ({"weight": WEIGHT.t()}, ValueError, r"weight.*H = 4.*\[4, 5\]"),
    "weight-dtype": ({"weight": WEIGHT.bfloat16()}, TypeError, "weight.*float32.*bfloat16"),
    "weight-device": ({"weight": WEIGHT.to("meta")}, ValueError, "weight.*cpu.*meta"),
    "weight-none": ({"weight": None}, TypeError, "weight.*None"),
    "hidden-is-logits": ({"hidden": torch.zeros(2, 3, 5)}, ValueError, r"weight.*H = 5.*\[5, 4\]"),
    "hidden-integer": ({"hidden": HIDDEN_STATES.long()}, TypeError, "hidden"),
    "bias-length": ({"bias": torch.zeros(4)}, ValueError, r"bias.*\[5\].*\[4\]"),
    "bias-dtype": ({"bias": torch.zeros(5).half()}, TypeError, "bias"),
    "chunk-bytes": ({"chunk_bytes": 0}, ValueError, "chunk_bytes"),
    "label": ({"weight": torch.zeros(3, 4)}, ValueError, r"targets.*\[0, 3\).*got 3"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name: str, backend: str) -> None:
    changes, error, message = BAD_CALLS[name]
    batch = PolicyBatch(torch.tensor([[1, 2, 3], [4, 0, -100]]), torch.ones(2))
    with pytest.raises(error, match=message):
        rlkernels.linear_policy_loss(**({"hidden": HIDDEN_STATES, "weight": WEIGHT, "batch": batch} | changes))


@pytest.mark.parametrize(
    "config, softcap, logit_scale",
    [
        ({"model_type": "llama"}, None, 1.0),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, 30.0, 1.0),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30.0}, 30.0, 1.0),
        ({"model_type": "cohere", "logit_scale": 0.0625}, None, 0.0625),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.02}, None, 0.02),
        ({"model_type": "granitemoe", "logits_scaling": 8.0}, None, 0.125),
        ({"model_type": "hyperclovax", "logits_scaling": 0.125}, None, 0.125),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_head_arguments(config: dict[str, Any], softcap: float | None, logit_scale: float) -> None:
    arguments = rlkernels.head_arguments(SimpleNamespace(**config))
    assert arguments == {"softcap": softcap, "logit_scale": logit_scale}


def test_unknown_logits_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="logits_scaling"):
        rlkernels.head_arguments(SimpleNamespace(model_type="new", logits_scaling=2.0))
    model = SimpleNamespace(config=SimpleNamespace(final_logit_softcapping=30.0))
    for config in (model, "google/gemma-2-2b", [30.0], None):
        with pytest.raises(TypeError, match="config: expected a transformers config"):
            rlkernels.head_arguments(config)


def test_entropy_bonus_with_a_frozen_head(generator: Generator) -> None:
    """A gradient through the entropy makes the logits again."""
    tensors = head(generator)
    tensors["weight"].requires_grad_(False)
    tensors["bias"].requires_grad_(False)
    assert_equal_paths(tensors, batch_of(generator), GRPO(entropy_coef=0.1))


def test_masked_hidden_rows_cannot_be_felt(backend: str, generator: Generator) -> None:
    hidden, weight = draw(generator, 2, HIDDEN), draw(generator, 9, HIDDEN)
    with torch.no_grad():
        hidden[1] = torch.nan
    stats = rlkernels.linear_token_stats(hidden, weight, torch.tensor([0, -100]))
    assert torch.autograd.grad(stats.logp.sum(), weight)[0].isfinite().all()


def test_autocast_leaves_float64_alone(generator: Generator) -> None:
    tensors = head(generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert from_hidden(tensors, batch_of(generator)).loss.dtype == torch.float64
