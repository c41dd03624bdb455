"""The native structs of an operation, from its tensors. The only file that takes a tensor's address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream

if TYPE_CHECKING:  # the operation's file imports the backends
    from rlkernels.ops.policy_objective import ObjectiveBatch

DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _addresses(tensors: dict[str, Tensor | None]) -> dict[str, int]:
    return {name: address(tensor) for name, tensor in tensors.items()}


class Params:
    """Builds the structs of one native module, which the same fields give in each."""

    def __init__(self, native: Any, threads: int = 0) -> None:
        self._native, self._threads = native, threads

    def _rows(self, rows: Rows, tile: Tile | None, index: Tensor | None = None) -> dict[str, Any]:
        outer, inner, vocab = rows.logits.shape
        stride_outer, stride_inner, stride_vocab = rows.logits.stride()
        return {
            "logits": self._native.LogitsView(
                data=address(rows.logits),
                dtype=DTYPE_CODES[rows.logits.dtype],
                outer=outer,
                inner=inner,
                vocab=vocab,
                stride_outer=stride_outer,
                stride_inner=stride_inner,
                stride_vocab=stride_vocab,
                index=address(index),
                count=rows.targets.shape[0],
            ),
            "scaling": self._native.RowScaling(
                temperature=address(rows.temperature),
                temperature_stride=int(rows.temperature.numel() > 1),
                softcap=address(rows.softcap),
                logit_scale=address(rows.logit_scale),
            ),
            "vocab": vocab if tile is None else tile.vocab,
            "vocab_start": 0 if tile is None else tile.start,
            "targets": address(rows.targets),
            "ignore_index": rows.ignore_index,
            "threads": self._threads,
        }

    def forward(
        self, rows: Rows, stats: RowStats, tile: Tile | None, states: Tensor | None, index: Tensor | None = None
    ) -> Any:
        out = self._native.RowStatsOut(**_addresses(stats._asdict()))
        return self._native.TokenStatsForwardParams(**self._rows(rows, tile, index), out=out, states=address(states))

    def backward(
        self,
        rows: Rows,
        saved: SavedStats,
        upstream: Upstream,
        dlogits: Tensor,
        tile: Tile | None,
        dtarget: Tensor | None,
    ) -> Any:
        tensors = {**saved._asdict(), **upstream._asdict(), "dlogits": dlogits, "dtarget": dtarget}
        return self._native.TokenStatsBackwardParams(**self._rows(rows, tile), **_addresses(tensors))

    def objective(self, options: ObjectiveOptions, batch: ObjectiveBatch, **tensors: Tensor | None) -> Any:
        tokens = batch.mask.shape[0]
        per_token = {
            f"{name}_per_token": value is not None and value.shape[0] == tokens
            for name, value in (
                ("advantages", batch.advantages),
                ("policy_weight", batch.policy_weight),
                ("success_rate", batch.success_rate),
            )
        }
        tensors |= {name: value for name, value in batch._asdict().items() if not isinstance(value, int)}
        return self._native.PolicyObjectiveParams(
            options=self._native.ObjectiveOptions(**options._asdict()),
            dtype=DTYPE_CODES[batch.advantages.dtype],
            tokens=tokens,
            sequences=batch.sequences,
            width=tokens // max(1, batch.sequences),
            reduction=batch.reduction,
            entropy_reduction=batch.entropy_reduction,
            threads=self._threads,
            **per_token,
            **_addresses(tensors),
        )

    def sweep(
        self, rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch, stats: RowStats, dlogits: Tensor
    ) -> Any:
        unused = dict.fromkeys(("logp", "entropy", "loss", "metrics", "dlogp", "dentropy"))
        return self._native.PolicySweepParams(
            stats=self.forward(rows, stats, None, None),
            objective=self.objective(options, batch, **unused),
            dlogits=address(dlogits),
        )

    def prefix_counts(
        self, token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor, counts: Tensor
    ) -> Any:
        rows, width = token_ids.shape
        return self._native.PrefixCountsParams(
            token_ids=address(token_ids),
            rows=rows,
            width=width,
            lengths=address(lengths),
            row_order=address(row_order),
            group_starts=address(group_starts),
            groups=group_starts.shape[0] - 1,
            counts=address(counts),
            threads=self._threads,
        )
