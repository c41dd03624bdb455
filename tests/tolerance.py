"""How far a result may be from float64: twice what PyTorch itself loses in the tested dtype, plus a constant."""

import torch

# In units of the largest magnitude of the exact result.
CONSTANT = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}


def assert_as_exact_as_torch(
    actual: torch.Tensor,
    torch_result: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
    name: str = "result",
) -> None:
    """`actual` against the float64 `exact`, judged by `torch_result`, PyTorch's in `dtype`.

    The constant is the rounding of the output itself in the dtype that it is stored in.
    """
    assert actual.shape == exact.shape, (name, actual.shape, exact.shape)
    actual, torch_result = actual.double(), torch_result.double()
    assert torch.equal(actual.isnan(), exact.isnan()), f"{name}: NaN in other places"
    finite = exact.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(), exact[~finite].nan_to_num()), f"{name}: other infinities"
    if not finite.any():
        return
    error = (actual - exact)[finite].abs().max().item()
    own_error = (torch_result - exact)[finite].abs().nan_to_num(torch.inf).max().item()
    scale = exact[finite].abs().max().item()
    bound = 2 * own_error + CONSTANT[dtype] * scale
    assert error <= bound, f"{name}: error {error:.3e}, torch's own {own_error:.3e}, bound {bound:.3e}"
