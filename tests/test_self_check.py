"""A GPU kernel's first use in a process: a wrong result raises, a right one is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rlkernels
from rlkernels.backends import cuda, self_check
from rlkernels.credit import counterfactual_contrast, prefix_set_counts
from rlkernels.ops.rows import compute_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def nothing_passed(monkeypatch: pytest.MonkeyPatch, select_backend: Callable[[str], str]) -> Iterator[None]:
    monkeypatch.setattr(self_check, "_passed", set())
    select_backend("cuda")
    yield


def policy_loss() -> None:
    logits = torch.linspace(-1, 1, 12).view(1, 3, 4).requires_grad_()
    batch = rlkernels.PolicyBatch(torch.tensor([[0, 1, 2]]), torch.ones(1))
    rlkernels.policy_loss(logits, batch, "grpo").loss.backward()


USES: dict[str, Callable[[], Any]] = {
    "token_stats": lambda: rlkernels.token_stats(torch.zeros(2, 5), torch.tensor([0, 1])),
    "linear_token_stats": lambda: rlkernels.linear_token_stats(
        torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 1])
    ),
    "indexed_logp": lambda: counterfactual_contrast(torch.zeros(2, 5), torch.ones(2, 5), torch.tensor([0, 1])),
    "policy_objective": lambda: rlkernels.logp_policy_loss(
        torch.zeros(1, 3), rlkernels.PolicyBatch(None, torch.ones(1)), "grpo"
    ),
    "policy_sweep": policy_loss,
    "prefix_counts": lambda: prefix_set_counts(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), groups=2),
}
# a launch, and the result of its arguments that a wrong kernel writes
Result = Callable[..., torch.Tensor]
LAUNCHES: dict[str, tuple[str, Result]] = {
    "token_stats_forward": ("token_stats", lambda rows, stats, *_: stats.entropy),
    "token_stats_backward": ("token_stats", lambda rows, saved, upstream, dlogits, *_: dlogits),
    "policy_objective": ("policy_objective", lambda *arguments: arguments[-1].dlogp),
    "policy_sweep": ("policy_sweep", lambda *arguments: arguments[-1]),
    "scale_unless_one": ("policy_sweep", lambda dlogits, factor: dlogits),
    "prefix_counts": ("prefix_counts", lambda *arguments: arguments[-1]),
}


def break_launch(name: str, patch: pytest.MonkeyPatch) -> None:
    launch, result_of = getattr(cuda, name), LAUNCHES[name][1]

    def wrong(*arguments: Any) -> None:
        launch(*arguments)
        result = result_of(*arguments)
        if result.numel():
            result.view(-1)[0] += 1

    patch.setattr(cuda, name, wrong)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_wrong_kernel_raises_whenever_it_is_used(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_launch(launch, monkeypatch)
    operation = LAUNCHES[launch][0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"backend 'cuda': {operation} gives a wrong .*RLKERNELS_SELF_CHECK=0"):
            USES[operation]()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_it_can_be_turned_off(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_launch(launch, monkeypatch)
    monkeypatch.setenv(self_check.ENVIRONMENT_VARIABLE, "0")
    USES[LAUNCHES[launch][0]]()
    assert not self_check._passed


def test_a_kernel_that_writes_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "token_stats_backward", lambda rows, saved, upstream, dlogits: dlogits.fill_(torch.nan))
    with pytest.raises(RuntimeError, match="wrong gradient"):
        USES["token_stats"]()


def test_a_kernel_that_takes_other_rows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = cuda.token_stats_forward
    monkeypatch.setattr(
        cuda, "token_stats_forward", lambda rows, stats, index: launch(rows, stats, index=index.flip(0))
    )
    with pytest.raises(RuntimeError, match="indexed_logp gives a wrong logp"):
        USES["indexed_logp"]()


@pytest.mark.parametrize("operation", USES)
def test_a_right_kernel_is_looked_at_once(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    USES[operation]()
    assert self_check._CHECKS[operation] in {key[1] for key in self_check._passed}
    monkeypatch.setattr(self_check, "_failure", lambda *_: "second look")
    USES[operation]()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("operation", ["token_stats", "policy_sweep"])
def test_every_dtype_is_looked_at(operation: str, dtype: torch.dtype) -> None:
    self_check.once(cuda, "cuda", operation, torch.device("cpu"), dtype)  # type: ignore[arg-type]
    assert {key[3] for key in self_check._passed} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_an_operation_is_looked_at_in_the_dtype_that_it_gets(dtype: torch.dtype) -> None:
    logits = torch.linspace(-1, 1, 12, dtype=dtype).view(1, 3, 4).requires_grad_()
    batch = rlkernels.PolicyBatch(torch.tensor([[0, 1, 2]]), torch.ones(1))
    rlkernels.policy_loss(logits, batch, "grpo").loss.backward()
    dtypes = {key[1]: key[3] for key in self_check._passed}
    assert dtypes[self_check._policy_objective] == compute_dtype(dtype)
    assert dtype in dtypes.values()


def test_it_runs_under_the_modes_of_a_caller() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        USES["token_stats"]()
    assert self_check._passed


def test_nothing_is_looked_at_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    self_check.once(cuda, "cuda", "token_stats", torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    assert not self_check._passed


def test_nothing_is_looked_at_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    self_check.once(cuda, "cuda", "token_stats", torch.device("cuda:0"), torch.float32)  # type: ignore[arg-type]
    assert not self_check._passed
