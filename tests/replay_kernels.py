"""Runs recorded launches of the CUDA kernels on the CPU. A script for a process with a sanitizer: numpy alone.

    python replay_kernels.py MODULE.so RECORDING.npz

The recording holds `calls`, JSON of what was called with which structs; an address in it is an array's name and an
offset into that array. Arrays are there as bytes, before and after the calls. Prints the launched kernels' names.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import numpy as np


def load(path: str) -> Any:
    name = path.rsplit("/", 1)[-1].split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_all(module: Any, recording: Any) -> None:
    arrays: dict[str, np.ndarray] = {}

    def value_of(recorded: Any) -> Any:
        if not isinstance(recorded, dict):
            return recorded
        if "struct" in recorded:
            fields = {name: value_of(field) for name, field in recorded["fields"].items()}
            return getattr(module, recorded["struct"])(**fields)
        array = arrays[recorded["array"]]
        return array.ctypes.data + recorded["offset"]

    for call in json.loads(str(recording["calls"])):
        # of their exact sizes, so that a byte too many is seen
        arrays = {name: recording[f"{name}/before"].copy() for name in call["arrays"]}
        assert all(array.ctypes.data % 16 == 0 for array in arrays.values())
        module.set_schedule(call["schedule"])
        arguments = {name: value_of(value) for name, value in call["keywords"].items()}
        getattr(module, call["function"])(*map(value_of, call["positional"]), **arguments)
        for name, array in arrays.items():
            if f"{name}/after" in recording:
                np.testing.assert_array_equal(array, recording[f"{name}/after"], err_msg=f"{call['function']} {name}")


if __name__ == "__main__":
    kernels = load(sys.argv[1])
    with np.load(sys.argv[2]) as stored:
        run_all(kernels, dict(stored))
    print(json.dumps(kernels.launched_kernels()))
