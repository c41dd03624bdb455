"""The demo's table: time and peak memory of the fused loss beside naive PyTorch and `torch.compile`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from rlkernels.cli import measure
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, forward_backward, make_rows, make_step, why_not_compiled

TOKENS, VOCAB = 512, 151_936  # Qwen's vocabulary
DTYPE = torch.bfloat16
ROUNDS = 5


class Measurement(NamedTuple):
    """Of forward and backward; memory beyond the logits."""

    seconds: float | None = None
    peak_bytes: int | None = None
    failure: str | None = None


def measure_losses(
    tokens: int, vocab: int, dtype: torch.dtype, device: str, console: Console
) -> dict[str, Measurement]:
    """Each loss's median time, in turns and after compilation, and then its peak memory."""
    with console.status("compiling") as status:
        rows = make_rows(tokens, vocab, dtype, device)
        failure = why_not_compiled(rows)
        names = [FUSED, NAIVE] if failure else [FUSED, NAIVE, COMPILED]
        status.update("measuring time")
        steps = {name: partial(forward_backward, name, rows) for name in names}
        medians = measure.interleaved_medians(steps, ROUNDS, device)
        del rows, steps
        measured = {}
        for name in names:
            status.update(f"measuring memory: {name}")
            peak = measure.peak_bytes(partial(make_step, name, tokens, vocab, dtype, device), device)
            measured[name] = Measurement(medians[name], peak)
    if failure:
        measured[COMPILED] = Measurement(failure=failure)
    return measured


def loss_table(device: str, console: Console) -> Table:
    measured = measure_losses(TOKENS, VOCAB, DTYPE, device, console)
    fused_seconds = measured[FUSED].seconds
    assert fused_seconds is not None
    gradient = TOKENS * VOCAB * DTYPE.itemsize
    table = Table(
        title=f"GRPO loss, forward + backward, bf16 logits [{TOKENS}, {VOCAB:,}]",
        caption=f"Medians of {ROUNDS} rounds in turns, compilation excluded. The gradient itself takes "
        f"{gradient / 2**20:.0f} MiB.",
    )
    table.add_column("loss")
    for heading in ("time", "x rlkernels", "peak beyond logits", "beyond their gradient"):
        table.add_column(heading, justify="right")
    for name, result in measured.items():
        if result.seconds is None:
            table.add_row(name, "unavailable")
            table.caption = f"{table.caption}\n{name} is unavailable: {result.failure}"
            continue
        time = f"{1e3 * result.seconds:.0f} ms"
        peak, extra = _mib(result.peak_bytes), _mib(result.peak_bytes, gradient)
        table.add_row(name, time, f"{result.seconds / fused_seconds:.1f}", peak, extra)
    return table


def _mib(count: int | None, less: int = 0) -> str:
    """The system counts pages in batches for each thread, so that a peak of nothing may come out below zero."""
    return "not measured" if count is None else f"{max(count - less, 0) / 2**20:.0f} MiB"
