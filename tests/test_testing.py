"""Diagnosis of a user's own batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import GRPO, PolicyBatch
from rlkernels.__main__ import main
from rlkernels.testing import compare_with_reference, load_call, save_call

B, T, V, H = 3, 5, 67, 8


def random_batch(generator: Generator, **fields: Tensor) -> PolicyBatch:
    targets = torch.randint(V, (B, T), generator=generator)
    targets[1, 3:] = -100
    old_logp = -4 + 0.3 * torch.randn(B, T, generator=generator)
    return PolicyBatch(targets, torch.tensor([1.0, -1.0, 0.5]), **{"old_logp": old_logp, **fields})


def random_sources(path: str, generator: Generator) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "logits": {"logits": draw(B, T, V)},
        "hidden": {"hidden": draw(B, T, H), "weight": draw(V, H), "bias": draw(V)},
        "logp": {"logp": -4 + 0.3 * draw(B, T), "entropy": draw(B, T).abs()},
    }[path]


@pytest.mark.parametrize("objective", ["dapo", "gspo", GRPO(entropy_coef=0.1, kl_coef=0.1)], ids=["dapo", "gspo", "kl"])
@pytest.mark.parametrize("path", ["logits", "hidden", "logp"])
def test_a_sound_batch(path: str, objective: Any, generator: Generator) -> None:
    batch = random_batch(generator, ref_logp=torch.full((B, T), -4.0))
    sources = random_sources(path, generator)
    found = compare_with_reference(batch, objective, **sources)
    assert found.first is None and "everything is finite" in str(found)
    quantities = {deviation.quantity for deviation in found.deviations}
    wanted = {"loss of a token", "loss", *(f"gradient of {name}" for name in sources)}
    if objective in ("dapo", "gspo"):
        wanted.discard("gradient of entropy")
    assert quantities == wanted | ({"logp", "entropy"} if path != "logp" else set())
    assert {deviation.backend for deviation in found.deviations} | set(found.unavailable) == set(
        rlkernels.backends.NAMES[1:]
    )
    for deviation in found.deviations:
        assert deviation.error <= 2 * deviation.torch_error + 1e-6, deviation


@pytest.mark.parametrize("name", ["old_logp", "ref_logp", "advantages", "weight", "policy_weight"])
def test_a_bad_number_of_the_batch(name: str, generator: Generator) -> None:
    values = torch.ones(B, T)
    values[2, 1], values[1, 4] = torch.nan, torch.inf  # the latter is masked
    fields: dict[str, Tensor] = {"ref_logp": torch.full((B, T), -4.0), name: values}
    advantages = fields.pop("advantages", None)
    batch = random_batch(generator, **fields)
    if advantages is not None:
        batch.advantages = advantages
    first = compare_with_reference(batch, GRPO(kl_coef=0.1), **random_sources("logits", generator)).first
    assert first is not None and first.quantity == f"batch.{name}"
    assert (first.sequence, first.token, first.entries) == (2, 1, 1)


def test_packed_sequences_and_vocabularies(generator: Generator) -> None:
    logits = torch.randn(9, V, generator=generator)
    logits[:, 5] = -torch.inf  # not in the vocabulary
    logits[7, 11] = torch.nan
    targets = torch.randint(6, V, (9,), generator=generator)
    batch = PolicyBatch(targets, torch.ones(3), cu_seqlens=torch.tensor([0, 4, 4, 9]))
    first = compare_with_reference(batch, "grpo", logits=logits).first
    assert first is not None
    assert (first.quantity, first.sequence, first.token, first.position) == ("logits", 2, 3, (11,))
    assert str(first) == "logits of sequence 2, token 3 at [11]: nan (1 in all)"


def test_what_overflows_on_the_way(generator: Generator) -> None:
    """A target outside of the vocabulary: every input is sound, its log-probability is not."""
    logits = torch.randn(B, T, V, generator=generator)
    batch = random_batch(generator)
    assert batch.targets is not None
    logits[0, 2, batch.targets[0, 2]] = -torch.inf
    found = compare_with_reference(batch, "grpo", logits=logits)
    assert found.first is not None
    assert (found.first.quantity, found.first.sequence, found.first.token) == ("logp", 0, 2)


def test_a_bad_head(generator: Generator) -> None:
    sources = random_sources("hidden", generator)
    sources["weight"][3, 2] = torch.inf
    first = compare_with_reference(random_batch(generator), "grpo", **sources).first
    assert first is not None and (first.quantity, first.sequence, first.position) == ("weight", None, (3, 2))


def test_a_wrong_backend_is_seen(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if rlkernels.backends.why_unavailable("cpu") is not None:
        pytest.skip("needs the C++ extension")
    native = rlkernels.backends.implementation("token_stats", torch.zeros(1))
    forward = native.token_stats_forward

    def wrong(rows: Any, stats: Any, *more: Any, **options: Any) -> None:
        forward(rows, stats, *more, **options)
        stats.logp.mul_(1.01)

    monkeypatch.setattr(native, "token_stats_forward", wrong)
    found = compare_with_reference(random_batch(generator), "gspo", **random_sources("logits", generator))
    errors = {(deviation.backend, deviation.quantity): deviation for deviation in found.deviations}
    assert errors["cpu", "logp"].error > 1e-3 > errors["cpu", "logp"].torch_error
    assert errors["reference", "logp"].error < 1e-5


def test_the_selected_backend_stays(generator: Generator) -> None:
    before = rlkernels.backend()
    compare_with_reference(random_batch(generator), **random_sources("logits", generator))
    assert rlkernels.backend() == before
    with pytest.raises(ValueError, match="temperature"):
        compare_with_reference(random_batch(generator), **random_sources("logits", generator), temperature=0.0)
    assert rlkernels.backend() == before


@pytest.mark.parametrize("names", [(), ("logits", "logp"), ("hidden",), ("weight",), ("logits", "bias")], ids=str)
def test_one_source(names: tuple[str, ...], generator: Generator) -> None:
    sources = {name: torch.zeros(B, T) for name in names}
    with pytest.raises(ValueError, match="expected logits alone, or hidden and weight"):
        compare_with_reference(random_batch(generator), **sources)


def test_saved_and_diagnosed(tmp_path: Path, generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch.pt"
    batch = random_batch(generator, ref_logp=torch.full((B, T), -4.0))
    objective = GRPO(clip_high=0.3, kl_coef=0.1)
    sources = random_sources("hidden", generator)
    save_call(path, batch, objective, **sources, temperature=0.7, reduction="token_mean")
    with pytest.raises(FileExistsError):
        save_call(path, batch)
    call = load_call(path)
    assert call["objective"] == objective and call["temperature"] == 0.7
    assert torch.equal(call["hidden"], sources["hidden"]) and torch.equal(call["batch"].targets, batch.targets)
    assert main(["doctor", "--batch", str(path)]) == 0
    assert "everything is finite" in capsys.readouterr().out

    sources["hidden"][1, 0, 4] = torch.nan
    save_call(tmp_path / "bad.pt", batch, "grpo", **sources)
    assert main(["doctor", "--batch", str(tmp_path / "bad.pt")]) == 1
    assert "first not finite: hidden of sequence 1, token 0 at [4]: nan" in capsys.readouterr().out


def test_files_that_are_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    (tmp_path / "text.pt").write_text("no batch")
    for name in ("weights.pt", "text.pt", "absent.pt"):
        assert main(["doctor", "--batch", str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err


def test_what_cannot_be_saved(tmp_path: Path, generator: Generator) -> None:
    batch = random_batch(generator)
    with pytest.raises(TypeError, match="objective: expected a recipe's name"):
        save_call(tmp_path / "a.pt", batch, lambda logp, batch: logp)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="logits: expected a tensor"):
        save_call(tmp_path / "a.pt", batch, logits=[1.0])
    assert not (tmp_path / "a.pt").exists()
