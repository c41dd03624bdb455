"""What `import rlkernels` costs: nothing that takes long is imported before it is used."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

CODE = """
import sys, torch
before = set(sys.modules)
import rlkernels
print(*sorted(name for name in set(sys.modules) - before if "." not in name or name == "torch._dynamo"))
"""


def test_import_is_quick() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    slow = {"torch._dynamo", "rich", "matplotlib", "trl", "transformers"}
    if not torch.cuda.is_available():
        slow.add("triton")
    assert slow.isdisjoint(run.stdout.split())
