"""Random structs, most of them half valid, at every entry point of a native module. A script for a process with
AddressSanitizer: numpy alone.

    python fuzz_native.py MODULE.so --seed 1 --seconds 20 [--isa generic] [--progress FILE] [--case 17]

An array is exactly as large as its struct says, so a call has to raise ValueError or to stay inside; one without a
fault has to run. A case follows from its number and the seed: `--case` repeats one. Its number is in the file of
`--progress` before it runs. Prints, as JSON, how many calls of each entry point ran and how many were refused.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from replay_kernels import load

LARGEST = 1 << 47  # elements: csrc/check_params.h
LIMIT = 1 << 20  # bytes; what is larger, and allowed, is not tried

DTYPES, FLOAT64, BFLOAT16 = range(4), 0, 2
ITEM_BYTES = {0: 8, 1: 4, 2: 2, 3: 2}
STATE_BYTES = 56
METRICS = 17
KINDS, GEOMETRIC = range(7), 2

INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2, 7, 4097, 2**31 - 1, 2**31, LARGEST, LARGEST + 1, 2**62, 2**63 - 1, 2**63)
CODES = (-1, 3, 4, 7, 99, 2**31, 0.5, 1e300, math.inf, math.nan)
NUMBERS = (0.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan)
LABELS = (-(2**63), -(2**62), -4097, -1, 2**31, 2**40, 2**63 - 1)
WIDTHS = (0, 1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 100, 129, 257)
ORDINARY = np.random.default_rng(0).standard_normal(2 * LIMIT)
LONG_WIDTHS = (4095, 4096, 4097, 8192, 9001)


class Unsatisfiable(Exception):
    """The struct may be right, but its arrays are too large to be tried."""


class Draw:
    """The numbers and arrays of one case."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rate = rng.choice((0.0, 0.01, 0.02, 0.05))  # of faults
        self.is_sound = True  # nothing is wrong, so that the call has to run
        self.is_impossible = False  # a size that no array can have, so that the call has to be refused
        self._arrays: list[np.ndarray] = []

    def faulty(self) -> bool:
        if self.rng.random() >= self.rate:
            return False
        self.is_sound = False
        return True

    def integer(self, value: int) -> int:
        if not self.faulty():
            return value
        return self.rng.choice((*INTEGERS, value - 1, value + 1, 2 * value, -value))

    def code(self, value: float) -> float:
        return self.rng.choice(CODES) if self.faulty() else value

    def number(self, *values: float) -> float:
        """Any is safe, so none is a fault."""
        return self.rng.choice((*values, *NUMBERS) if self.rate else values)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.rng.random() < probability

    def claim(self, count: int, item_bytes: int, most: int = LARGEST) -> int:
        """The bytes of an array; few, where there cannot be so many elements."""
        if count < 0 or count > most:
            self.is_impossible |= count > most
            return 1
        if count * item_bytes > LIMIT:
            raise Unsatisfiable
        return count * item_bytes

    def address(self, count: int, item_bytes: int, values: Callable[[int], Any], most: int = LARGEST) -> int:
        """Of an array, which `values` fills from the number of its bytes."""
        size = self.claim(count, item_bytes, most)
        fault = self.rng.choice(("null", "misaligned")) if self.faulty() else None
        if fault == "null" or (size == 0 and self.maybe()):
            return 0
        skew = self.rng.randrange(1, 8) if fault == "misaligned" else 0 if size else 16  # past the end
        array = np.empty(size + skew, np.uint8)
        if size:
            array[skew:] = np.frombuffer(values(size), np.uint8)[:size]
        self._arrays.append(array)
        return array.ctypes.data + skew

    def maybe_address(self, *arguments: Any, needed: bool = False, probability: float = 0.5) -> int:
        return self.address(*arguments) if needed or self.maybe(probability) else 0

    # contents

    def bits(self, size: int) -> bytes:
        return self.rng.randbytes(size)

    def zeros(self, size: int) -> bytes:
        return bytes(size)

    def floats(self, item_bytes: int, scale: float = 3.0, lowest: float = -math.inf) -> Callable[[int], bytes]:
        """Ordinary ones, or, where there may be faults, any."""

        def fill(size: int) -> bytes:
            if self.faulty():
                return self.bits(size)
            start = self.rng.randrange(LIMIT)
            values = ORDINARY[start : start + size // item_bytes + 1] * scale
            values = np.maximum(np.abs(values), lowest) if lowest > 0 else values
            if item_bytes == 2:
                return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
            return values.astype(np.float64 if item_bytes == 8 else np.float32).tobytes()

        return fill

    def int64s(self, values: list[int]) -> Callable[[int], bytes]:
        """These, one of them wrong where there is a fault; or whatever there is, where they are not as many."""

        def fill(size: int) -> bytes:
            given = list(values)
            while given and self.faulty():
                at = self.rng.randrange(len(given))
                given[at] = self.rng.choice((*LABELS, given[at] + 1, given[at] - 1, self.rng.choice(given)))
            array = np.array([(value + 2**63) % 2**64 - 2**63 for value in given], np.int64)
            if array.nbytes < size:
                self.is_sound = False
                array = np.resize(array, size // 8 + 1) if array.size else np.zeros(size // 8 + 1, np.int64)
            return array.tobytes()

        return fill


class Rows:
    """Logits and what is known of their rows."""

    def __init__(self, d: Draw, module: Any, *, is_whole: bool, may_have_index: bool) -> None:
        self.code = d.rng.choice(DTYPES)
        dtype = d.code(self.code)
        self.item_bytes = ITEM_BYTES.get(dtype, 8)
        self.compute_bytes = 8 if dtype == FLOAT64 else 4
        outer, inner = d.integer(d.rng.randrange(4)), d.integer(d.rng.randrange(5))
        self.width = vocab = d.integer(d.rng.choice(LONG_WIDTHS if d.maybe(0.1) else WIDTHS))
        strides = self._strides(d, outer, inner, vocab)
        is_packed = strides == [inner * vocab, vocab, 1]
        strides = [d.integer(stride) for stride in strides]
        self.stored = outer * inner
        has_index = may_have_index and self.stored > 0 and d.maybe(0.3)
        self.count = d.integer(d.rng.randrange(1, 7) if has_index else self.stored)
        self.index = 0
        if has_index:
            picks = [d.rng.randrange(min(self.stored, 99)) for _ in range(max(0, min(self.count, 99)))]
            self.index = d.address(self.count, 8, d.int64s(picks))
            if self.index == 0:
                d.is_sound = False
        self.is_contiguous = is_packed and self.index == 0
        span = 0
        if min(outer, inner, vocab) > 0:
            span = 1 + sum((size - 1) * stride for size, stride in zip((outer, inner, vocab), strides, strict=True))
        most = (2**63 - 1) // self.item_bytes - 1
        self.elements = self.count * vocab if min(self.count, vocab) > 0 else 0
        d.claim(self.elements, self.item_bytes, most)  # expanded logits may be few, but take as long
        self.data = d.address(span, self.item_bytes, d.floats(self.item_bytes), most)
        self.logits = module.LogitsView(
            data=self.data,
            dtype=dtype,
            outer=outer,
            inner=inner,
            vocab=vocab,
            stride_outer=strides[0],
            stride_inner=strides[1],
            stride_vocab=strides[2],
            index=self.index,
            count=self.count,
        )
        self.start = d.integer(0 if is_whole or d.maybe() else d.rng.choice((1, 4096, 8192)))
        rest = 0 if is_whole or d.maybe() else d.rng.choice((1, 4096))
        self.vocab = d.integer(self.start + vocab + rest)
        ignore = d.rng.choice((-100, -1, 0, *LABELS))
        labels = [
            ignore if d.maybe(0.2) or self.vocab < 1 else d.rng.randrange(self.vocab)
            for _ in range(max(0, min(self.count, 99)))
        ]
        positive = d.floats(self.compute_bytes, 1.0, 0.1)
        of_each = d.maybe()
        stride = d.integer(int(of_each))
        self.fields = {
            "logits": self.logits,
            "vocab": self.vocab,
            "vocab_start": self.start,
            "targets": d.address(self.count, 8, d.int64s(labels)),
            "ignore_index": ignore,
            "scaling": module.RowScaling(
                temperature=d.address(self.count if stride == 1 else min(1, self.count), self.compute_bytes, positive),
                temperature_stride=stride,
                softcap=d.maybe_address(1, self.compute_bytes, positive, probability=0.3),
                logit_scale=d.address(1, self.compute_bytes, positive),
            ),
            "threads": d.integer(1 if d.maybe(0.9) else 3),
        }

    @staticmethod
    def _strides(d: Draw, outer: int, inner: int, vocab: int) -> list[int]:
        """Of rows in either order, with or without gaps, expanded or not."""
        apart = 1 if d.maybe(0.75) else d.rng.choice((0, 2, 3))
        gap = 0 if d.maybe() else d.rng.choice((1, 3, 8))
        near = (max(1, vocab * apart) if apart == 0 else vocab * apart) + gap
        if d.maybe(0.2):
            return [near, near * outer, apart]
        return [0 if d.maybe(0.1) else near * inner, 0 if d.maybe(0.1) else near, apart]

    def values(self, d: Draw, needed: bool = False) -> int:
        """An array of one value a row, which may be missing unless it is needed."""
        return d.maybe_address(self.count, self.compute_bytes, d.floats(self.compute_bytes), needed=needed)

    def gradient(self, d: Draw) -> int:
        return d.address(self.elements, self.item_bytes, d.bits, (2**63 - 1) // self.item_bytes - 1)


def forward_struct(d: Draw, module: Any, rows: Rows, *, of_sweep: bool = False, has_bonus: bool = False) -> Any:
    def extra() -> int:
        return 0 if of_sweep and not d.faulty() else rows.values(d)

    out = module.RowStatsOut(
        logp=rows.values(d, of_sweep),
        entropy=rows.values(d, has_bonus),
        lse=rows.values(d),
        log_sum_sq_probs=extra(),
        mean_logits=extra(),
        is_top1=0 if of_sweep else d.maybe_address(rows.count, 1, d.bits),
        row_max=rows.values(d, of_sweep),
        log_sum_exp=rows.values(d, of_sweep),
    )
    is_whole = rows.start == 0 and rows.width == rows.vocab
    states = d.maybe_address(rows.count, STATE_BYTES, d.floats(8), needed=not is_whole, probability=0.3)
    return module.TokenStatsForwardParams(**rows.fields, out=out, states=states)


def token_stats_forward(d: Draw, module: Any) -> Any:
    return forward_struct(d, module, Rows(d, module, is_whole=d.maybe(), may_have_index=True))


def token_stats_backward(d: Draw, module: Any) -> Any:
    rows = Rows(d, module, is_whole=d.maybe(), may_have_index=True)
    in_place = rows.is_contiguous and d.maybe(0.3)
    dentropy = rows.values(d)
    return module.TokenStatsBackwardParams(
        **rows.fields,
        dlogp=rows.values(d),
        dentropy=dentropy,
        dlse=rows.values(d),
        row_max=rows.values(d, True),
        log_sum_exp=rows.values(d, True),
        entropy=rows.values(d, dentropy != 0),
        dlogits=rows.data if in_place else rows.gradient(d),
        dtarget=rows.values(d),
    )


def options_struct(d: Draw, module: Any, *, token_level: bool) -> tuple[Any, bool, bool]:
    """And whether it has a KL term and an entropy bonus."""
    kind = d.rng.choice([kind for kind in KINDS if not (token_level and kind == GEOMETRIC)])
    kl_coef, entropy_coef = d.number(0.0, 0.1), d.number(0.0, 0.01)
    options = module.ObjectiveOptions(
        kind=d.code(kind),
        level=d.code(0 if token_level else d.rng.randrange(3)),
        log_ratio_clamp=d.number(math.inf, 1.0),
        ratio_min=d.number(0.8, -math.inf),
        ratio_max=d.number(1.2, math.inf),
        dual_clip=d.number(math.inf, 3.0),
        ratio_cap=d.number(math.inf, 2.0),
        log_ratio_min=d.number(-math.inf, -0.4),
        log_ratio_max=d.number(math.inf, 0.4),
        clips_sequence=d.code(d.rng.randrange(2)),
        tau_pos=d.number(1.0),
        tau_neg=d.number(1.05),
        min_ratio=d.number(1.0, 1e-3),
        negative_weight=d.number(1.0),
        rate_min=d.number(0.1),
        rate_max=d.number(0.9),
        prompt_weight=d.code(d.rng.randrange(3)),
        kl_coef=kl_coef,
        kl_estimator=d.code(d.rng.randrange(1, 4)),
        kl_clamp=d.number(math.inf, 10.0),
        kl_importance_weighted=d.code(d.rng.randrange(2)),
        entropy_coef=entropy_coef,
    )
    return options, kl_coef != 0, entropy_coef != 0


def objective_struct(d: Draw, module: Any, *, rows: Rows | None = None) -> tuple[Any, bool]:
    """Of a sweep over the rows, or by itself; and whether it has an entropy bonus."""
    options, has_kl, has_bonus = options_struct(d, module, token_level=rows is not None)
    lengths = [d.rng.choice((0, 1, 2, 5, 31, 300)) for _ in range(d.rng.randrange(5))]
    if d.maybe():
        lengths = lengths[:1] * len(lengths)
    dtype = d.rng.randrange(2)
    if rows is not None:
        dtype = 0 if rows.code == FLOAT64 else 1
        tokens = max(0, rows.count + (d.rng.choice((-1, 1, 300)) if d.faulty() else 0))
        cut = d.rng.randrange(tokens + 1) if tokens < 99 else 0
        lengths = [tokens] if d.maybe(0.3) else [cut, tokens - cut]
    is_packed = d.maybe() or len(set(lengths)) > 1
    width = lengths[0] if lengths else 0
    dtype = d.code(dtype)
    item_bytes = 8 if dtype == 0 else 4
    sequences, tokens = d.integer(len(lengths)), d.integer(sum(lengths))
    d.claim(sequences, 256)
    borders = [0, *itertools.accumulate(lengths)]
    cu_seqlens = d.address(sequences + 1, 8, d.int64s(borders), LARGEST + 1) if is_packed else 0
    if is_packed and cu_seqlens == 0:
        d.is_sound = False

    def of_tokens(needed: bool = False) -> int:
        return d.maybe_address(tokens, item_bytes, d.floats(item_bytes, 0.5), needed=needed)

    def per(needed: bool = False) -> tuple[int, float]:
        flag = d.code(d.rng.randrange(2))
        values = d.floats(item_bytes, 0.5)
        count = tokens if flag else sequences
        return d.maybe_address(count, item_bytes, values, needed=needed and tokens != 0), flag

    def normalizer() -> int:
        return d.maybe_address(1, 8, d.floats(8, 1.0, 0.1), probability=0.3)

    (advantages, by_token), (policy_weight, weight_by_token), (rate, rate_by_token) = per(True), per(), per()
    needed = rows is None
    struct = module.PolicyObjectiveParams(
        options=options,
        dtype=dtype,
        tokens=tokens,
        sequences=sequences,
        width=d.integer(width),
        cu_seqlens=cu_seqlens,
        mask=d.address(tokens, 1, d.zeros if d.maybe(0.1) else d.bits),
        logp=of_tokens(needed) if needed else 0,
        entropy=of_tokens(has_bonus) if needed else 0,
        old_logp=of_tokens(),
        ref_logp=of_tokens(has_kl),
        weight=of_tokens(),
        advantages=advantages,
        policy_weight=policy_weight,
        success_rate=rate,
        advantages_per_token=by_token,
        policy_weight_per_token=weight_by_token,
        success_rate_per_token=rate_by_token,
        reduction=d.code(d.rng.randrange(5)),
        entropy_reduction=d.code(d.rng.randrange(5)),
        normalizer=normalizer(),
        entropy_normalizer=normalizer(),
        loss=d.address(1, item_bytes, d.bits) if needed else 0,
        metrics=d.address(METRICS, 8, d.bits) if needed else 0,
        dlogp=of_tokens() if needed else 0,
        dentropy=of_tokens() if needed else 0,
        threads=d.integer(1 if d.maybe(0.9) else 3),
    )
    return struct, has_bonus


def policy_objective(d: Draw, module: Any) -> Any:
    return objective_struct(d, module)[0]


def policy_sweep(d: Draw, module: Any) -> Any:
    rows = Rows(d, module, is_whole=True, may_have_index=False)
    objective, has_bonus = objective_struct(d, module, rows=rows)
    stats = forward_struct(d, module, rows, of_sweep=True, has_bonus=has_bonus)
    return module.PolicySweepParams(stats=stats, objective=objective, dlogits=rows.gradient(d))


def prefix_counts(d: Draw, module: Any) -> Any:
    sizes = [d.rng.randrange(4) for _ in range(d.rng.randrange(1, 4))]
    rows, width = d.integer(sum(sizes)), d.integer(d.rng.choice((0, 1, 2, 31, 33, 64, 65, 200)))
    groups = d.integer(len(sizes))
    d.claim(rows, 8)
    order = list(range(sum(sizes)))
    d.rng.shuffle(order)
    lengths = [d.rng.randrange(max(1, min(width + 1, 300))) for _ in order]
    tokens = rows * width if min(rows, width) > 0 else 0
    alphabet = d.rng.choice((1, 2))

    def ids(size: int) -> bytes:
        return np.random.default_rng(d.rng.getrandbits(32)).integers(0, alphabet, size // 8 + 1).tobytes()

    return module.PrefixCountsParams(
        token_ids=d.address(tokens, 8, ids, 2**60 - 1),
        rows=rows,
        width=width,
        lengths=d.address(rows, 8, d.int64s(lengths)),
        row_order=d.address(rows, 8, d.int64s(order)),
        group_starts=d.address(groups + 1, 8, d.int64s([0, *itertools.accumulate(sizes)]), LARGEST + 1),
        groups=groups,
        counts=d.address(tokens, 4, d.bits, 2**60 - 1),
        threads=d.integer(1 if d.maybe(0.9) else 3),
    )


ENTRIES = {
    function.__name__: function
    for function in (token_stats_forward, token_stats_backward, policy_objective, policy_sweep, prefix_counts)
}


ON_CPU = tuple(ENTRIES)
# in turn; what takes a launch of many blocks less often
ON_DEVICE = (
    *("token_stats_forward", "token_stats_backward", "prefix_counts", "scale_unless_one") * 5,
    *("policy_sweep", "policy_sweep", "policy_objective"),
)


def call_on_cpu(d: Draw, module: Any, entry: str) -> None:
    getattr(module, entry)(ENTRIES[entry](d, module))


def call_on_device(d: Draw, module: Any, entry: str) -> None:
    stream = {"stream": 0}
    if entry == "scale_unless_one":
        dtype = d.code(d.rng.choice(DTYPES))
        count, item_bytes = d.integer(d.rng.choice(WIDTHS)), ITEM_BYTES.get(dtype, 8)
        compute_bytes = 8 if dtype == FLOAT64 else 4
        module.scale_unless_one(
            values=d.address(count, item_bytes, d.floats(item_bytes)),
            dtype=dtype if isinstance(dtype, int) and abs(dtype) < 2**31 else -1,
            count=count if abs(count) < 2**63 else -1,
            factor=d.address(1, compute_bytes, d.floats(compute_bytes)),
            **stream,
        )
        return
    module.set_schedule(d.rng.randrange(4))
    params = ENTRIES[entry](d, module)
    processors = {"multiprocessors": d.rng.choice((1, 1000))}
    more: dict[str, int] = {}
    if entry == "policy_objective":
        more["workspace"] = d.address(module.policy_objective_workspace_bytes(params), 1, d.bits)
    elif entry in ("token_stats_forward", "policy_sweep"):
        size = getattr(module, f"{entry.removesuffix('_forward')}_workspace_bytes")(params, **processors)
        more["workspace"] = d.address(size, 1, d.bits) if size else 0
    if entry in ("token_stats_backward", "policy_sweep"):
        more |= processors
    if entry == "policy_sweep":
        more["shared_limit"] = d.rng.choice((0, 227 << 10))
    getattr(module, entry)(params, **stream, **more)


def run_case(module: Any, seed: int, number: int) -> tuple[str, str]:
    """The entry point, and whether it "ran" or was "refused"."""
    d = Draw(random.Random(f"{seed}:{number}"))
    is_device = hasattr(module, "set_schedule")
    entries = ON_DEVICE if is_device else ON_CPU
    entry = entries[number % len(entries)]
    try:
        (call_on_device if is_device else call_on_cpu)(d, module, entry)
    except Unsatisfiable:
        return entry, "too large"
    except ValueError as error:
        if d.is_sound:
            raise AssertionError(f"{entry} refuses what is right: {error}") from error
        return entry, "refused"
    assert not d.is_impossible, f"{entry} takes sizes that no array has"
    return entry, "ran"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--isa")
    parser.add_argument("--progress")
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    module = load(args.module)
    if args.isa:
        module.set_isa(args.isa)
    if args.case is not None:
        print(run_case(module, args.seed, args.case))
        return
    progress = np.memmap(args.progress, np.int64, "w+", shape=1) if args.progress else np.zeros(1, np.int64)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    end = time.monotonic() + args.seconds
    number = 0
    while time.monotonic() < end:
        progress[0] = number
        entry, outcome = run_case(module, args.seed, number)
        counts[entry][outcome] += 1
        number += 1
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
