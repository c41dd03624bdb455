"""Diagnosis of a user's own batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import GRPO, ClipCov, Objective, PolicyBatch
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


@pytest.mark.parametrize(
    "content",
    [
        {"batch": {}, "objective": {"class": "set_backend", "fields": {"name": "reference"}}},
        {"batch": {}, "objective": {"class": "PolicyBatch", "fields": {}}},
        {"batch": {}, "objective": {"class": "Objective", "fields": {}}},
        {"batch": {}, "objective": {"class": ["GRPO"], "fields": {}}},
        {"batch": {}, "objective": {"class": "GRPO", "fields": {"clip_low": -1.0}}},
        {"batch": {}, "objective": {"class": "GRPO", "fields": {"cliplow": 1.0}}},
        {"batch": {}, "objective": 3},
        {"batch": {}, "objective": "grpo"},
        {"batch": {"targets": "none", "advantages": None}, "objective": "grpo"},
        {"batch": {"targets": {"a": torch.zeros(9, 9)}, "advantages": None}, "objective": "grpo"},
        {"batch": [], "objective": "grpo"},
        {"objective": "grpo"},
        [1, 2],
    ],
)
def test_files_that_are_made_up(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    before = rlkernels.backend()
    with pytest.raises(ValueError, match=r"a\.pt: expected a file of rlkernels\.testing\.save_call, got ") as raised:
        load_call(tmp_path / "a.pt")
    assert "\n" not in str(raised.value) and rlkernels.backend() == before


@pytest.mark.parametrize("option", [{"tempreature": 0.7}, {"temperature": -1.0}, {"softcap": "much"}], ids=str)
def test_files_that_the_loss_refuses(
    option: dict[str, Any], tmp_path: Path, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pt"
    save_call(path, random_batch(generator), **random_sources("logits", generator))
    torch.save({**torch.load(path), **option}, path)
    assert main(["doctor", "--batch", str(path)]) == 1
    message = capsys.readouterr().err
    assert str(path) in message and next(iter(option)) in message and message.count("\n") == 1


def test_a_damaged_file(tmp_path: Path, generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.pt"
    save_call(path, random_batch(generator), **random_sources("logits", generator))
    whole = path.read_bytes()
    for content in (b"", b"\x80\x02\xb1", bytes(range(256)) * 8, whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        assert main(["doctor", "--batch", str(path)]) == 1
        message = capsys.readouterr().err
        assert message == (
            f"rlkernels doctor: {path}: expected a file of rlkernels.testing.save_call, got another or a damaged one\n"
        )


class MyGRPO(GRPO):
    pass


class Odd(float):
    pass


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (GRPO, {}, "objective: expected an instance"),
        (Objective(), {}, "objective: expected a recipe's name or an objective of this package"),
        (lambda logp, batch: logp, {}, "objective: .*compare_with_reference directly"),
        (MyGRPO(), {}, "objective: .*compare_with_reference directly"),
        (ClipCov(generator=Generator()), {}, r"objective\.generator: expected a tensor, number"),
        ("grpoo", {}, "objective: expected one of"),
        ("grpo", {"tempreature": 0.7}, "tempreature"),
        ("grpo", {"temperature": 0.0}, "temperature: "),
        ("grpo", {"reduction": "mean"}, "reduction: "),
        ("grpo", {"logits": None}, "logits, hidden, logp: expected logits alone"),
        ("grpo", {"logits": [1.0]}, "logits: expected a tensor"),
        ("grpo", {"logits": torch.zeros(B, T + 1, V)}, "targets: |logits: "),
    ],
)
def test_what_cannot_be_saved(
    objective: Any, arguments: dict[str, Any], message: str, tmp_path: Path, generator: Generator
) -> None:
    sources: dict[str, Any] = random_sources("logits", generator)
    with pytest.raises((TypeError, ValueError), match=message):
        save_call(tmp_path / "a.pt", random_batch(generator), objective, **{**sources, **arguments})
    assert not list(tmp_path.iterdir())


def test_no_batch(tmp_path: Path, generator: Generator) -> None:
    sources = random_sources("logits", generator)
    with pytest.raises(TypeError, match="batch: expected a PolicyBatch, got NoneType"):
        save_call(tmp_path / "a.pt", None, **sources)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch: expected a PolicyBatch, got NoneType"):
        compare_with_reference(None, **sources)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_numbers_of_other_types(tmp_path: Path, generator: Generator) -> None:
    path = tmp_path / "a.pt"
    objective = GRPO(kl_coef=np.float32(0.5), clip_high=np.float64(0.3))
    batch = random_batch(generator, ref_logp=torch.full((B, T), -4.0))
    options = {"temperature": np.float64(0.7), "softcap": Odd(30), "normalizer": np.int64(4)}
    save_call(path, batch, objective, **random_sources("logits", generator), **options)
    call = load_call(path)
    assert call["objective"] == objective
    assert {name: (type(call[name]), call[name]) for name in options} == {
        "temperature": (float, 0.7),
        "softcap": (float, 30.0),
        "normalizer": (int, 4),
    }
    assert compare_with_reference(**call).first is None


def test_saved_tensors_are_no_views(tmp_path: Path, generator: Generator) -> None:
    path = tmp_path / "a.pt"
    rows = torch.nn.Parameter(torch.randn(1000, T, V, generator=generator))
    old_logp = torch.full((1000, T), -4.0)[:B]
    save_call(path, random_batch(generator, old_logp=old_logp), logits=rows[:B])
    assert path.stat().st_size < 20_000  # of 1.3 MB
    call = load_call(path)
    assert torch.equal(call["logits"], rows[:B]) and torch.equal(call["batch"].old_logp, old_logp)


def test_saving_draws_no_random_numbers(tmp_path: Path, generator: Generator) -> None:
    state = torch.get_rng_state()
    save_call(tmp_path / "a.pt", random_batch(generator), "clip_cov", **random_sources("logits", generator))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_is_whole_or_absent(tmp_path: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    path, save = tmp_path / "a.pt", torch.save
    batch, sources = random_batch(generator), random_sources("logits", generator)

    def failing(stored: Any, file: Any) -> None:
        file.write(b"stump")
        raise OSError("disk full")

    def late(stored: Any, file: Any) -> None:
        save(stored, file)
        path.write_text("another's")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="disk full"):
        save_call(path, batch, **sources)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(torch, "save", late)
    with pytest.raises(FileExistsError):
        save_call(path, batch, **sources)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["another's"]
