"""What a policy loss is told about its tokens besides the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.segments import Segments, check_layout

IGNORE_INDEX = -100

_PER_TOKEN = ("mask", "old_logp", "ref_logp", "weight")


class PolicyBatch:
    """Targets, advantages, masks and log-probabilities of a batch of responses, padded or packed.

    Floats, given in any float or integer dtype, are detached and kept in float32 (float64 stays float64). A plain class
    on purpose: wrappers that cast the floats of dataclasses and containers to half precision leave it alone.

    Args:
        targets: `[B, T]` padded, `[N]` or `[1, N]` packed with `cu_seqlens`; `[N]` alone is one sequence. Integer
            labels of the rows of the logits: `logits[i]` scores `targets[i]`. None for `logp_policy_loss` alone.
        advantages: `[B]`, `[B, 1]` or `targets`' shape. Where B = N, `[B]` is taken for one a token, here and in what
            follows; `[B, 1]` never is.
        mask: `targets`' shape, any dtype, nonzero = trained; None: `targets != -100`. A label under mask 0 is
            never read.
        old_logp: `targets`' shape: log-probabilities under the policy that sampled. None: on-policy, the ratio is
            1 and the gradient goes through it.
        ref_logp: `targets`' shape: log-probabilities under the KL term's reference model.
        weight: `targets`' shape: multiplies a token's policy and KL terms, not the entropy bonus
            (lambda-GRPO's 1 / count).
        policy_weight: `[B]`, `[B, 1]` or `targets`' shape: multiplies the policy term after clipping, before KL
            and entropy (truncated importance sampling). Enters no ratio, denominator or clip metric; 0 selects
            the token's policy term away.
        cu_seqlens: `[B + 1]` int32 or int64, borders of packed sequences, from 0 to N.
        rows: `[M]` integers, rising: indices into the flat tokens of those that `linear_policy_loss` computes, such as
            `mask.flatten().nonzero().squeeze(1)`. A GPU's host does not know how many tokens are masked and projects
            them all, unless it has this. A trained token that is left out gives NaN. The CPU needs none.
        extras: `[B]` or `[B, 1]` tensors that one objective alone needs, such as NFT's `success_rate`.

    Raises:
        TypeError, ValueError: a wrong type, shape, dtype, device or border, naming the argument.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(torch.tensor([[3, 5, -100], [2, 7, 1]]), torch.tensor([1.0, -1.0]))
        >>> batch.mask.tolist()
        [[True, True, False], [True, True, True]]
    """

    def __init__(
        self,
        targets: Tensor | None,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        weight: Tensor | None = None,
        policy_weight: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rows: Tensor | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> None:
        if targets is not None:
            checks.require_tensor("targets", targets)
            checks.require_dtype("targets", targets, checks.INTEGER_DTYPES)
            targets = targets.to(torch.int64)  # a narrower dtype may not hold -100
        self.targets = targets
        self.mask = _mask(targets, mask)
        self.advantages = _as_float("advantages", advantages)
        self.old_logp = None if old_logp is None else _as_float("old_logp", old_logp)
        self.ref_logp = None if ref_logp is None else _as_float("ref_logp", ref_logp)
        self.weight = None if weight is None else _as_float("weight", weight)
        self.policy_weight = None if policy_weight is None else _as_float("policy_weight", policy_weight)
        self.cu_seqlens = cu_seqlens
        self.rows = rows
        self.span = slice(None)
        if extras is not None and not isinstance(extras, Mapping):
            raise TypeError(f"extras: expected a mapping from names to tensors, got {checks.describe(extras)}")
        self.extras = {name: _as_float(f"extras[{name!r}]", value) for name, value in (extras or {}).items()}
        per_token = [x for x in (targets, self.mask, self.old_logp, self.ref_logp) if x is not None]
        if per_token:
            self.check_against(tuple(per_token[0].shape), per_token[0].device)

    @classmethod
    def from_input_ids(
        cls,
        input_ids: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        weight: Tensor | None = None,
        policy_weight: Tensor | None = None,
        rows: Tensor | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> PolicyBatch:
        """A batch for the model's full logits: the shift by one token is done inside each sequence.

            targets[i] = input_ids[i + 1],  mask[i] = loss_mask[i + 1];  a sequence's last row is masked

        Args:
            input_ids: `[B, T]`, or `[N]` or `[1, N]` with `cu_seqlens`, integers: what the model read.
            loss_mask: `input_ids`' shape, any dtype, nonzero where token i itself is trained.
            advantages: `[B]`, `[B, 1]`, or `input_ids`' shape (of token i itself; shifted as well).
            cu_seqlens, old_logp, ref_logp, weight, policy_weight, rows, extras: as in `PolicyBatch`, by row of the
                logits, as `token_stats` returns them: not shifted.

        Returns:
            A `PolicyBatch` of the shifted targets, mask and advantages.

        Raises: as `PolicyBatch`.

        Example:
            >>> import torch, rlkernels
            >>> batch = rlkernels.PolicyBatch.from_input_ids(
            ...     torch.tensor([10, 11, 12, 20, 21]), torch.ones(5), torch.tensor([1.0, -1.0]),
            ...     cu_seqlens=torch.tensor([0, 3, 5]))
            >>> batch.targets.tolist()
            [11, 12, -100, 21, -100]
        """
        for name, value in (("input_ids", input_ids), ("loss_mask", loss_mask), ("advantages", advantages)):
            checks.require_tensor(name, value)
            checks.require_strided(name, value)
        checks.require_dtype("input_ids", input_ids, checks.INTEGER_DTYPES)
        checks.require_shape("loss_mask", loss_mask, tuple(input_ids.shape))
        checks.require_same_device("input_ids", input_ids, loss_mask=loss_mask, advantages=advantages)
        check_layout(tuple(input_ids.shape), cu_seqlens, input_ids.device)
        is_last = torch.zeros_like(input_ids, dtype=torch.bool)
        is_last[..., -1:] = True
        if cu_seqlens is not None:
            # the row before a border is a sequence's last; an empty sequence repeats a border
            positions = torch.arange(input_ids.shape[-1], device=input_ids.device)
            is_last |= torch.isin(positions + 1, cu_seqlens[1:].to(positions.dtype))

        def shifted(values: Tensor, fill: float) -> Tensor:
            return values.roll(-1, dims=-1).masked_fill(is_last, fill)

        if advantages.shape == input_ids.shape:
            advantages = shifted(advantages, 0)
        return cls(
            shifted(input_ids.to(torch.int64), IGNORE_INDEX),
            advantages,
            mask=shifted(loss_mask != 0, 0),
            old_logp=old_logp,
            ref_logp=ref_logp,
            weight=weight,
            policy_weight=policy_weight,
            cu_seqlens=cu_seqlens,
            rows=rows,
            extras=extras,
        )

    def check_against(self, shape: tuple[int, ...], device: torch.device) -> Segments:
        """Checks every tensor against the tokens' shape and device; returns the sequences."""
        check_layout(shape, self.cu_seqlens, device)
        segments = Segments(shape, self.cu_seqlens)
        per_sequence = ((segments.count,), (segments.count, 1))
        for name in _PER_TOKEN:
            self._check(name, getattr(self, name), device, shape)
        for name in ("advantages", "policy_weight"):
            self._check(name, getattr(self, name), device, *per_sequence, shape)
        if self.rows is not None:
            checks.check_indices("rows", self.rows, segments.tokens, device)
        for name, value in self.extras.items():
            self._check(f"extras[{name!r}]", value, device, *per_sequence, shape)
        return segments

    @staticmethod
    def _check(name: str, value: Tensor | None, device: torch.device, *shapes: tuple[int, ...]) -> None:
        if value is not None:
            checks.require_shape(name, value, *shapes)
            if value.device != device:
                raise ValueError(f"{name}: expected on {device} like the tokens, got {checks.describe(value)}")

    @staticmethod
    def per_token(value: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
        """A `[B]`, `[B, 1]` or token-shaped value as flat `[N]`."""
        flat = value.reshape(-1)
        return (flat if tuple(value.shape) == segments.shape else segments.expand(flat)).to(dtype)

    def split(self, k: int) -> list[PolicyBatch]:
        """`k` micro-batches of whole sequences (fewer if there are fewer sequences), in order.

        Each has `span`, the slice of the tokens' first dimension (of N where they are packed) that it covers:
        `policy_loss(logits[part.span], part, ...)`, `logits[:, part.span]` for `[1, N]`. Reads `cu_seqlens`
        and `rows` on the host.

        Args:
            k: >= 1.

        Returns:
            At most `k` batches of equally many sequences, but for the last.

        Raises:
            ValueError: `k` < 1, or a batch without targets and mask, whose size is not known.

        Example:
            >>> import torch, rlkernels
            >>> batch = rlkernels.PolicyBatch(torch.zeros(5, 3, dtype=torch.long), torch.ones(5))
            >>> [part.span for part in batch.split(2)]
            [slice(0, 3, None), slice(3, 5, None)]
        """
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer >= 1, got {k!r}")
        like = self.targets if self.targets is not None else self.mask
        if like is None:
            raise ValueError("split: expected a batch with targets or mask, got one without")
        segments = Segments(tuple(like.shape), self.cu_seqlens)
        step = max(1, -(-segments.count // k))
        borders = None if self.cu_seqlens is None else self.cu_seqlens.tolist()
        parts = []
        for first in range(0, segments.count, step):
            last = min(first + step, segments.count)
            if borders is not None:
                span = slice(borders[first], borders[last])
            else:
                span = slice(first, last) if like.ndim == 2 else slice(0, like.shape[0])
            parts.append(self._part(tuple(like.shape), segments, slice(first, last), span))
        return parts

    def _part(self, shape: tuple[int, ...], segments: Segments, sequences: slice, span: slice) -> PolicyBatch:
        def cut(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            if tuple(value.shape) != shape:
                own = value[sequences]
                is_ambiguous = self.cu_seqlens is not None and own.ndim == 1 and len(own) == span.stop - span.start
                return own[:, None] if is_ambiguous else own  # [B] would be taken for one a token
            return value[:, span] if self.cu_seqlens is not None and value.ndim == 2 else value[span]

        borders = self.cu_seqlens
        part = PolicyBatch(
            cut(self.targets),
            cut(self.advantages),  # type: ignore[arg-type]
            cu_seqlens=None
            if borders is None
            else borders[sequences.start : sequences.stop + 1] - borders[sequences.start],
            policy_weight=cut(self.policy_weight),
            rows=None if self.rows is None else self._rows_between(*self._flat_range(shape, span)),
            extras={name: cut(value) for name, value in self.extras.items()},  # type: ignore[misc]
            **{name: cut(getattr(self, name)) for name in _PER_TOKEN},
        )
        part.span = span
        return part

    def _flat_range(self, shape: tuple[int, ...], span: slice) -> tuple[int, int]:
        width = shape[1] if len(shape) == 2 and self.cu_seqlens is None else 1
        return span.start * width, span.stop * width

    def _rows_between(self, start: int, stop: int) -> Tensor:
        assert self.rows is not None
        return self.rows[(self.rows >= start) & (self.rows < stop)] - start

    def to(self, device: torch.device | str) -> PolicyBatch:
        """The same batch with every tensor on `device`.

        Args:
            device: a torch device or its name.

        Returns:
            A new `PolicyBatch`; tensors that are there already are shared.
        """
        tensors: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(self).items()
        }
        tensors["extras"] = {name: value.to(device) for name, value in self.extras.items()}
        moved = PolicyBatch.__new__(PolicyBatch)
        vars(moved).update(tensors)
        return moved

    def __repr__(self) -> str:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return f"PolicyBatch({', '.join(f'{n}={checks.describe(v)}' for n, v in tensors.items())})"


def _as_float(name: str, value: Tensor) -> Tensor:
    checks.require_tensor(name, value)
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected a float or integer dtype, got {checks.describe(value)}")
    return value.detach().to(torch.float64 if value.dtype == torch.float64 else torch.float32)


def _mask(targets: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if mask is not None:
        checks.require_tensor("mask", mask)
        mask = mask != 0
    if targets is None:
        return mask
    labelled = targets != IGNORE_INDEX
    if mask is None:
        return labelled
    checks.require_shape("mask", mask, tuple(targets.shape))
    if mask.device != targets.device:
        raise ValueError(f"mask: expected on {targets.device} like targets, got {checks.describe(mask)}")
    return mask & labelled
