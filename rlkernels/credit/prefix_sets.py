"""lambda-GRPO's prefix sets: how many responses of a group share each prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import backends, checks, reference
from rlkernels.credit.groups import Groups
from rlkernels.ops.prefix_counts import prefix_counts


def prefix_set_counts(token_ids: Tensor, lengths: Tensor, groups: int | Tensor) -> Tensor:
    """Size of the prefix set of each token: the responses of its group that agree up to and including it.

        counts[i, t] = #{j in group(i) : len_j > t and token_ids[j, :t + 1] == token_ids[i, :t + 1]}

    Exact token identity up to the true lengths: padding never matters, responses that diverge never meet again,
    a strict prefix shares to its end. Tokens that the loss masks (tool output) take part like any other.
    lambda-GRPO's weight is `1 / counts`.

    Args:
        token_ids: `[B, T]`, any integer dtype; what lies past a response's length is not read.
        lengths: `[B]` integers in `[0, T]`: tokens of each response, its end token included.
        groups: group size (consecutive rows), or `[B]` integer ids.

    Returns:
        `[B, T]` int32, 1 at padding.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Lengths on a GPU are checked only under
            `set_checks(True)`.

    Source: lambda-GRPO (2509.21154), `InfPRMTree` of coli-saar/grpo-prm.

    Example:
        >>> import torch
        >>> from rlkernels.credit import prefix_set_counts
        >>> ids = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 0, 0]])
        >>> prefix_set_counts(ids, torch.tensor([3, 3, 1]), groups=3).tolist()
        [[3, 1, 1], [3, 1, 1], [3, 1, 1]]
    """
    check_responses(token_ids, lengths)
    group = Groups(groups, token_ids.shape[0], token_ids.device)
    if backends.choose(token_ids.device) == "reference":
        return reference.prefix_counts(token_ids, lengths, group.index)
    return prefix_counts(
        token_ids.to(torch.int64).contiguous(),
        lengths.to(torch.int64).contiguous(),
        group.row_order,
        group.starts,
    )


def check_responses(token_ids: Tensor, lengths: Tensor) -> None:
    """`[B, T]` token ids and `[B]` lengths in `[0, T]`."""
    for name, value in (("token_ids", token_ids), ("lengths", lengths)):
        checks.require_tensor(name, value)
        checks.require_dtype(name, value, checks.INTEGER_DTYPES)
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids: expected shape [B, T], got {checks.describe(token_ids)}")
    rows, width = token_ids.shape
    checks.require_shape("lengths", lengths, (rows,))
    checks.require_same_device("token_ids", token_ids, lengths=lengths)
    checks.check_values("lengths", lengths, (lengths >= 0) & (lengths <= width), "values in [0, {}]", width)
