"""ReTool: what the interpreter wrote is not trained, and a response is right or wrong."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import result_dtype, wide


def tool_output_mask(
    mask: Tensor,
    *,
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    token_ids: Tensor | None = None,
    opening: Sequence[int] | None = None,
    closing: Sequence[int] | None = None,
) -> Tensor:
    """The tokens that the policy wrote itself: the mask without tool output.

    Tool output is either what lies in `spans`, or what lies from an opening tag to the next closing tag, both tags
    included, since the environment writes them. A span that is never closed reaches the end; a closing tag outside
    any span was sampled by the policy and stays. Prefer spans, which the rollout engine knows: tags have to be cut
    into the same tokens every time.

    Args:
        mask: `[B, T]`, nonzero = a token of the response.
        spans: for each row its `(start, end)` pairs, `end` exclusive.
        token_ids: `[B, T]` integers; with them `opening` and `closing`, the tokens of the tags. Tokens under the mask's
            zeros match nothing. Neither tag may end with the other.
        opening, closing: as above.

    Returns:
        `[B, T]` bool.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: ReTool (2504.11536).

    Example:
        >>> import torch
        >>> from rlkernels.credit import tool_output_mask
        >>> ids = torch.tensor([[5, 90, 7, 7, 91, 6]])
        >>> tool_output_mask(torch.ones(1, 6), token_ids=ids, opening=[90], closing=[91]).int().tolist()
        [[1, 0, 0, 0, 0, 1]]
        >>> tool_output_mask(torch.ones(1, 6), spans=[[(1, 5)]]).int().tolist()
        [[1, 0, 0, 0, 0, 1]]
    """
    checks.require_tensor("mask", mask)
    checks.require_sizes("mask", mask, "B", "T")
    tags = (token_ids, opening, closing)
    if (spans is None) == (token_ids is None) or any((tag is None) != (token_ids is None) for tag in tags):
        given = "both" if spans is not None else "token_ids, opening and closing in part, or nothing"
        raise ValueError(f"spans: expected spans, or token_ids with opening and closing, got {given}")
    used = mask != 0
    if spans is not None:
        return used & ~_inside_spans(spans, mask.shape[0], mask.shape[1], mask.device)
    assert token_ids is not None and opening is not None and closing is not None
    checks.require_tensor("token_ids", token_ids)
    checks.require_dtype("token_ids", token_ids, checks.INTEGER_DTYPES)
    checks.require_shape("token_ids", token_ids, tuple(mask.shape))
    checks.require_same_device("mask", mask, token_ids=token_ids)
    opening, closing = _tag("opening", opening), _tag("closing", closing)
    if opening[-len(closing) :] == closing or closing[-len(opening) :] == opening:
        raise ValueError(f"closing: expected neither tag to end with the other, opening {opening}, got {closing}")
    return used & ~_inside_tags(token_ids, used, opening, closing)


def _tag(name: str, tokens: Sequence[int]) -> list[int]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise TypeError(f"{name}: expected a sequence of token ids, got {checks.describe(tokens)}")
    tokens = list(tokens)
    if not tokens or any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise ValueError(f"{name}: expected token ids, at least one, got {tokens!r}")
    return tokens


def _inside_spans(spans: Sequence[Sequence[tuple[int, int]]], rows: int, width: int, device: torch.device) -> Tensor:
    if not isinstance(spans, Sequence):
        raise TypeError(f"spans: expected a sequence for each row, got {checks.describe(spans)}")
    if len(spans) != rows:
        raise ValueError(f"spans: expected one sequence for each of {rows} rows, got {len(spans)}")
    # +1 where a span starts, -1 behind its end; spans may overlap
    steps = torch.zeros(rows, width + 1, dtype=torch.int32)
    for row, pairs in enumerate(spans):
        for pair in pairs if isinstance(pairs, Sequence) else [pairs]:
            if not _is_pair_of_ints(pair):
                raise TypeError(f"spans: expected pairs of ints, got {pair!r} in row {row}")
            start, end = pair
            if not 0 <= start <= end <= width:
                raise ValueError(f"spans: expected 0 <= start <= end <= {width}, got {(start, end)} in row {row}")
            steps[row, start] += 1
            steps[row, end] -= 1
    return (steps.cumsum(1)[:, :-1] > 0).to(device)


def _is_pair_of_ints(pair: object) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(x, numbers.Integral) for x in pair)


def _inside_tags(token_ids: Tensor, used: Tensor, opening: list[int], closing: list[int]) -> Tensor:
    opens, closes = (_ends_of(token_ids, used, tag) for tag in (opening, closing))
    # inside from the end of an opening tag to the end of the next closing tag: the last tag up to a token decides
    positions = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
    last = torch.where(opens | closes, positions, 0).cummax(1).values
    is_open = torch.cat([torch.zeros_like(opens[:, :1]), opens], dim=1).gather(1, last)
    was_open = torch.cat([torch.zeros_like(is_open[:, :1]), is_open[:, :-1]], dim=1)
    inside = is_open | was_open
    for back in range(1, len(opening)):  # the rest of the opening tag
        inside[:, :-back] |= opens[:, back:]
    return inside


def _ends_of(token_ids: Tensor, used: Tensor, tag: list[int]) -> Tensor:
    """`[B, T]` bool: where an occurrence of the tag ends."""
    ends = torch.zeros_like(used)
    width = token_ids.shape[1]
    if len(tag) > width:
        return ends
    windows = token_ids.unfold(1, len(tag), 1) == torch.tensor(tag, device=token_ids.device)
    ends[:, len(tag) - 1 :] = (windows & used.unfold(1, len(tag), 1)).all(-1)
    return ends


def _numbers(name: str, answers: Sequence[float | None]) -> list[float]:
    expected = "a tensor, or a sequence of bools, numbers and None"
    if not isinstance(answers, Sequence) or isinstance(answers, str):
        raise TypeError(f"{name}: expected {expected}, got {checks.describe(answers)}")
    for answer in answers:
        if not (answer is None or isinstance(answer, numbers.Real)):
            raise TypeError(f"{name}: expected {expected}, got {answer!r} in it")
    return [0.0 if answer is None else float(answer) for answer in answers]


def outcome_reward(correct: Tensor | Sequence[float | None]) -> Tensor:
    """1 for a right answer, -1 for a wrong one or one that cannot be read.

        R_i = 1 if correct_i > 0 else -1

    Args:
        correct: `[B]`, any dtype, or a sequence of bools or numbers: > 0 where the answer is right. None where no
            answer could be read. NaN (a rejected response) stays NaN.

    Returns:
        `[B]`, float32 (float64 for float64 `correct`).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: ReTool (2504.11536).

    Example:
        >>> from rlkernels.credit import outcome_reward
        >>> outcome_reward([True, False, None]).tolist()
        [1.0, -1.0, -1.0]
    """
    if not isinstance(correct, Tensor):
        correct = torch.tensor(_numbers("correct", correct))
    checks.require_reals("correct", correct, "B")
    values = wide(correct.detach())
    return torch.where(values.isnan(), values, torch.where(values > 0, 1.0, -1.0)).to(result_dtype(correct))
