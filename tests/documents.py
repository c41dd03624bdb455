"""What the documents hold: programs, commands, paths and links.

    python tests/documents.py docs/worked/accumulation.md

runs one page's program, as `torchrun` does on many processes.
"""

from __future__ import annotations

import ast
import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])

# The first lines of blocks that cannot run here, and what they need.
NOT_RUN = {
    "import runpy, ray": "OpenRLHF's own command line on Ray, with GPUs",
    "from verl.trainer.ppo.v1 import register_trainer": "verl 0.9.1",
    "from rlkernels.integrations.nemo_rl import PolicyLossFn": "NeMo-RL's master configuration",
}

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of its first line in the page

    @property
    def first(self) -> str:
        return self.code.partition("\n")[0]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in _FENCE.finditer(text)]


def prose(page: str) -> str:
    return _FENCE.sub("", text_of(page))


def commands(page: str) -> Iterator[str]:
    """Of shell blocks, and those that stand between backticks; one each, without what is chained to it."""
    for block in blocks(page):
        if block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                yield from (command.strip() for command in re.sub(r"\s#.*", "", line).split("&&"))
    yield from code_spans(page)


def code_spans(page: str) -> list[str]:
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: str) -> list[str]:
    """Those into the repository."""
    return [target for target in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", target)]


def anchors(page: str) -> set[str]:
    """What GitHub calls a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run_code_blocks(page: str) -> None:
    """A page's Python blocks are one program, in order; those with a prompt are doctests, each by itself."""
    program, names = [], {"__name__": "__main__"}
    for block in blocks(page):
        if block.language != "python":
            continue
        if ">>> " in block.code:
            _run_doctest(block, page)
        elif block.first in NOT_RUN:
            ast.parse(block.code)
        else:
            program.append(block)
    source = [""] * text_of(page).count("\n")
    for block in program:  # where they stand, so that a traceback shows the page's lines
        lines = block.code.splitlines()
        source[block.line - 1 : block.line - 1 + len(lines)] = lines
    exec(compile("\n".join(source), str(ROOT / page), "exec"), names)


def _run_doctest(block: Block, page: str) -> None:
    names: dict[str, Any] = {}
    test = doctest.DocTestParser().get_doctest(block.code, names, page, page, block.line)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


if __name__ == "__main__":
    run_code_blocks(sys.argv[1])
