"""The pool of large CPU buffers: reused, bounded, safe under threads and fork."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels.backends import memory

_native = pytest.importorskip("rlkernels._native")
MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    gc.collect()
    rlkernels.empty_cache()
    yield
    rlkernels.empty_cache()


def buffer(mib: float) -> Tensor:
    return memory.empty((int(mib * MIB),), torch.uint8, CPU)


def test_a_freed_buffer_is_handed_out_again() -> None:
    first = buffer(8)
    address = first.data_ptr()
    part = first[3:5]
    del first
    assert _native.idle_bytes() == 0, "a view still uses it"
    del part
    assert _native.idle_bytes() == 8 * MIB
    again = buffer(7)
    assert again.data_ptr() == address
    assert again.numel() == 7 * MIB
    assert buffer(7).data_ptr() != address, "one buffer, two owners"


def test_a_much_smaller_tensor_leaves_a_large_buffer_alone() -> None:
    del_me = buffer(64)
    del del_me
    small = buffer(8)
    assert _native.idle_bytes() == 64 * MIB
    assert small.numel() == 8 * MIB


@pytest.mark.parametrize("more", [1, 2 * MIB - 1, 2 * MIB])
def test_a_buffer_is_the_fewest_pages_that_hold_it(more: int) -> None:
    memory.empty((8 * MIB + more,), torch.uint8, CPU)
    assert _native.idle_bytes() == 10 * MIB


def test_small_tensors_are_torchs_own() -> None:
    tiny = buffer(1)
    del tiny
    assert _native.idle_bytes() == 0


def test_idle_memory_is_bounded_and_can_be_freed() -> None:
    # never written: untouched pages cost nothing
    many = [buffer(300) for _ in range(6)]
    many.clear()
    assert 0 < _native.idle_bytes() <= _native.idle_limit == 1 << 30
    rlkernels.empty_cache()
    assert _native.idle_bytes() == 0


def test_more_than_there_is_raises() -> None:
    with pytest.raises(MemoryError):
        buffer(1 << 30)


def _fill_and_check(seed: int) -> bool:
    for turn in range(30):
        values = buffer(4 + seed % 3).fill_((seed + turn) % 251)
        if not (values == (seed + turn) % 251).all():
            return False
    return True


def test_threads_never_share_a_buffer() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(_fill_and_check, range(16)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_allocate() -> None:
    """While another thread holds the pool's lock as often as it can."""
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            _native.Buffer(4 * MIB)

    held = _native.Buffer(4 * MIB)
    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                # no torch in here: its own thread pool does not survive a fork
                memoryview(_native.Buffer(4 * MIB))[0] = 1
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    assert len(memoryview(held)) == 4 * MIB


def test_a_gradient_is_a_tensor_like_any_other(generator: Generator) -> None:
    """It becomes `.grad` without a copy, can be written to, and gives its buffer back."""
    logits = torch.randn(300, 4000, generator=generator, requires_grad=True)
    targets = torch.randint(4000, (300,), generator=generator)
    rlkernels.token_stats(logits, targets, outputs=()).logp.sum().backward()
    assert logits.grad is not None
    address, expected = logits.grad.data_ptr(), 2 * logits.grad
    assert address % (2 * MIB) == 0, "not from the pool"
    logits.grad.mul_(2)
    assert torch.equal(logits.grad, expected)
    assert not logits.grad._is_view()
    logits.grad = None
    rlkernels.token_stats(logits, targets, outputs=()).logp.sum().backward()
    assert logits.grad.data_ptr() == address
