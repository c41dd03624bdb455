"""Code in the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_code_blocks(name: str) -> None:
    """A document's blocks are one program, in order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {})
