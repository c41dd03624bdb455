"""What compiled GPU kernels are made of: resources, and the memory accesses of their loops, read from the binary.

`cuobjdump` lies in the triton wheel; nothing runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Resources(NamedTuple):
    """Of a thread, and the shared bytes of a block that the kernel's code fixes."""

    registers: int
    stack: int
    local: int
    shared: int


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    operands: str

    def jump(self) -> int | None:
        target = re.search(r"\b0x([0-9a-f]+)\s*$", self.operands)
        return int(target[1], 16) if self.opcode.startswith("BRA") and target else None

    def ends_block(self) -> bool:
        return self.opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMX")

    def falls_through(self) -> bool:
        """A branch or an exit that not every thread takes; `BRA.DIV` and `BRA P0, ..` name their condition later."""
        return bool(self.predicate) or not self.ends_block() or (self.jump() is not None and "," in self.operands)

    def is_access(self) -> bool:
        """Of memory that is not only a thread's: loads and stores, global, shared, or either."""
        return self.opcode.split(".")[0] in ("LDG", "STG", "LD", "ST", "LDS", "STS")

    def is_global_access(self) -> bool:
        return self.opcode.split(".")[0] in ("LDG", "STG", "LD", "ST")

    def bits(self) -> int:
        widths = re.findall(r"\.[US]?(8|16|64|128|256)\b", self.opcode)
        return int(widths[0]) if widths else 32

    def is_local_access(self) -> bool:
        return self.opcode.split(".")[0] in ("LDL", "STL")


def _dump(option: str, binary: Path, target: str | None = None) -> str:
    architecture = [] if target is None else ["-arch", target]
    command = [str(TOOLS / "cuobjdump"), option, *architecture, str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def embedded_ptx(binary: Path) -> str:
    """Of whichever targets it is embedded for."""
    return _dump("-ptx", binary)


def read(binary: Path, target: str) -> dict[str, tuple[Resources, list[Instruction]]]:
    """Every kernel that a program or library holds for a target, by mangled name."""
    return parse(_dump("-res-usage", binary, target), _dump("-sass", binary, target))


def read_cubin(cubin: bytes) -> dict[str, tuple[Resources, list[Instruction]]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        binary = Path(file.name)
        return parse(_dump("-res-usage", binary), _dump("-sass", binary))


def parse(usage: str, sass: str) -> dict[str, tuple[Resources, list[Instruction]]]:
    resources = {
        name: Resources(*map(int, values))
        for name, *values in re.findall(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
            re.sub(r"SHARED:(\d+) LOCAL:(\d+)", r"SHARED:\2 LOCAL:\1", usage),
        )
    }
    code = dict(_functions(sass))
    return {name: (resources[name], code[name]) for name in code}


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


def _functions(sass: str) -> Iterator[tuple[str, list[Instruction]]]:
    name, found = "", list[Instruction]()
    for line in sass.splitlines():
        if "Function : " in line:
            if name:
                yield name, found
            name, found = line.split("Function : ")[1].strip(), []
        elif match := _LINE.match(line):
            found.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4].strip()))
    if name:
        yield name, found


Block = tuple[Instruction, ...]


def innermost_loops(code: list[Instruction], has: str) -> list[list[Instruction]]:
    """The smallest loops in which an opcode that matches `has` occurs, by address."""
    blocks = _basic_blocks(code)
    starts = sorted(blocks)
    following = dict(zip(starts, [*starts[1:], None], strict=True))
    successors: dict[int, set[int]] = {}
    for start, block in blocks.items():
        last = block[-1]
        after = {last.jump(), following[start] if last.falls_through() else None}
        successors[start] = {address for address in after if address in blocks}
    wanted = {start for start, block in blocks.items() if any(re.match(has, i.opcode) for i in block)}
    found = [
        [instruction for start in sorted(loop) for instruction in blocks[start]]
        for loop in _innermost(set(blocks), successors, wanted)
    ]
    return sorted(found, key=lambda loop: loop[0].address)


def _basic_blocks(code: list[Instruction]) -> dict[int, Block]:
    targets = {instruction.jump() for instruction in code}
    blocks: dict[int, Block] = {}
    current: list[Instruction] = []
    for instruction in code:
        if current and (instruction.address in targets or current[-1].ends_block()):
            blocks[current[0].address] = tuple(current)
            current = []
        current.append(instruction)
    if current:
        blocks[current[0].address] = tuple(current)
    return blocks


def _innermost(nodes: set[int], successors: dict[int, set[int]], wanted: set[int]) -> Iterator[set[int]]:
    for loop in _cycles(nodes, successors):
        if not loop & wanted:
            continue
        # without the jumps back to where it is entered, only the loops inside it are left
        entries = {s for node in nodes - loop for s in successors[node] & loop} or {min(loop)}
        inner = list(_innermost(loop - {min(entries)}, successors, wanted))
        yield from inner or [loop]


def _cycles(nodes: set[int], successors: dict[int, set[int]]) -> Iterator[set[int]]:
    """Strongly connected components that are loops (Kosaraju's algorithm)."""
    order: list[int] = []
    _visit_all(sorted(nodes), nodes, successors, order.append)
    predecessors: dict[int, set[int]] = {node: set() for node in nodes}
    for node in nodes:
        for successor in successors[node] & nodes:
            predecessors[successor].add(node)
    left = set(nodes)
    for root in reversed(order):
        if root not in left:
            continue
        component: list[int] = []
        _visit_all([root], left, predecessors, component.append)
        left -= set(component)
        if len(component) > 1 or root in successors[root]:
            yield set(component)


def _visit_all(
    roots: Iterable[int], nodes: set[int], edges: dict[int, set[int]], finished: Callable[[int], None]
) -> None:
    seen: set[int] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(next_node, False) for next_node in edges[node] & nodes if next_node not in seen]
