"""What a model does to its logits between the head's GEMM and the softmax."""

from __future__ import annotations

from typing import Any

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1


def head_arguments(config: Any) -> dict[str, float | None]:
    """`softcap` and `logit_scale` of a transformers config, as `linear_policy_loss` and `policy_loss` take them.

        z = softcap * tanh(logit_scale * (hidden @ weight.T) / softcap)

    Logits that come out of the model have been through both already.

    Args:
        config: a transformers config; of a multimodal one its text model's part is read.

    Returns:
        `{"softcap": ..., "logit_scale": ...}`, None and 1.0 where the model has none.

    Raises:
        TypeError: no config at all, or a model in place of its config.
        ValueError: a config with `logits_scaling` of a model that is not known to divide (Granite) or to multiply
            (HyperCLOVA X).

    Example:
        >>> import rlkernels
        >>> from types import SimpleNamespace
        >>> rlkernels.head_arguments(SimpleNamespace(model_type="granite", logits_scaling=8.0))
        {'softcap': None, 'logit_scale': 0.125}
    """
    is_model = hasattr(config, "config")
    if is_model or not hasattr(config, "__dict__"):
        instead = ": model.config is its config" if is_model else ""
        raise TypeError(f"config: expected a transformers config, got {type(config).__name__}{instead}")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    logit_scale = 1.0
    for name in _MULTIPLIERS:
        logit_scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    model_type = str(getattr(config, "model_type", ""))
    if model_type.startswith("granite"):
        logit_scale /= scaling
    elif model_type.startswith("hyperclovax"):
        logit_scale *= scaling
    elif scaling != 1.0:
        raise ValueError(
            f"config: expected logits_scaling of a granite or hyperclovax model, got model_type {model_type!r} "
            f"with logits_scaling {scaling}; pass logit_scale yourself"
        )
    return {"softcap": softcap, "logit_scale": logit_scale}
