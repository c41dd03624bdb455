"""The C++ extension; see csrc/bind.cpp. Addresses are integers, 0 for none."""

class LogitsView:
    def __init__(self, *, data: int, dtype: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None: ...

class RowScaling:
    def __init__(self, *, temperature: int, temperature_stride: int, softcap: int, logit_scale: int) -> None: ...

class Buffer:
    def __init__(self, bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ObjectiveOptions:
    def __init__(self, **fields: float) -> None: ...

class PolicyObjectiveParams:
    def __init__(self, **fields: object) -> None: ...

row_state_bytes: int
idle_limit: int

def idle_bytes() -> int: ...
def free_idle_buffers() -> None: ...
def available_isas() -> list[str]: ...
def current_isa() -> str: ...
def set_isa(name: str) -> None: ...
def token_stats_forward(
    *,
    logits: LogitsView,
    scaling: RowScaling,
    vocab: int,
    vocab_start: int,
    targets: int,
    ignore_index: int,
    logp: int,
    entropy: int,
    lse: int,
    log_sum_sq_probs: int,
    mean_logits: int,
    is_top1: int,
    row_max: int,
    log_sum_exp: int,
    states: int,
    threads: int,
) -> None: ...
def token_stats_backward(
    *,
    logits: LogitsView,
    scaling: RowScaling,
    vocab: int,
    vocab_start: int,
    targets: int,
    ignore_index: int,
    dlogp: int,
    dentropy: int,
    dlse: int,
    row_max: int,
    log_sum_exp: int,
    entropy: int,
    dlogits: int,
    dtarget: int,
    threads: int,
) -> None: ...
def policy_objective(params: PolicyObjectiveParams) -> None: ...
def policy_sweep(
    *,
    logits: LogitsView,
    scaling: RowScaling,
    targets: int,
    ignore_index: int,
    logp: int,
    entropy: int,
    row_max: int,
    log_sum_exp: int,
    objective: PolicyObjectiveParams,
    dlogits: int,
    threads: int,
) -> None: ...
def prefix_counts(
    *,
    token_ids: int,
    rows: int,
    width: int,
    lengths: int,
    row_order: int,
    group_starts: int,
    groups: int,
    counts: int,
    threads: int,
) -> None: ...
