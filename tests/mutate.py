"""Faults made by a machine: does the suite notice them?

    python tests/mutate.py --seed 7 --count 60 --jobs 2
    python tests/mutate.py --seed 7 --only triton_kernels/

Each mutant changes one operator, constant, sign, bound, mask or index of one line, in a copy of the checkout, and the
tests that matter for its file have to fail. The seed draws them, as many from each of `SOURCES` as from another. What
`equivalent_mutants.json` lists, with the reason why no value can notice it, is not drawn; a survivor belongs there or a
test is missing. C++ is built again for each mutant; nvcc is not needed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import pybind11
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
SECONDS = 1800  # of a mutant's tests; one that never ends is noticed too
SURVIVES = "survives"
NO_TEST_RAN = 5  # pytest's exit code


class Source(NamedTuple):
    """Files that a mutant is drawn from, and the tests of which one has to fail."""

    patterns: tuple[str, ...]
    tests: tuple[str, ...]
    keywords: str = ""  # pytest's -k


_OBJECTIVES = (
    "test_objectives",
    "test_objective_fields",
    "test_gmpo",
    "test_losses",
    "test_cases_losses",
    "test_goldens",
    "test_policy_objective",
    "test_bad_input",
    "test_docs",
)
_ROWS = (
    "test_row_kernels",
    "test_token_stats",
    "test_policy_objective",
    "test_reductions",
    "test_losses",
    "test_linear",
    "test_credit",
    "test_cases",
    "test_cases_losses",
    "test_contracts",
)
_ON_CPU = "not (cuda or triton or reference)"
_FROM_CPP = "not (triton or reference)"

SOURCES = (
    Source(("rlkernels/objectives.py", "rlkernels/*_objectives.py"), _OBJECTIVES, "reference or not (cuda or triton)"),
    Source(
        ("rlkernels/reductions.py",),
        ("test_reductions", "test_losses", "test_cases_losses", "test_bad_input", "test_distributed"),
    ),
    Source(
        ("rlkernels/credit/*.py",), ("test_credit*", "test_cases_credit", "test_goldens", "test_contracts", "test_docs")
    ),
    Source(("csrc/row_math.h", "csrc/objective.h"), (*_ROWS, "test_cuda_emulated"), _FROM_CPP),
    Source(
        ("csrc/cpu/*",), (*_ROWS, "test_own_threads", "test_credit_contrast", "test_bad_input*", "test_memory"), _ON_CPU
    ),
    Source(("csrc/cuda/*.cu", "csrc/cuda/*.cuh"), ("test_cuda_emulated", *_ROWS), "cuda"),
    # configs.py holds launch sizes: speed alone
    Source(("triton_kernels/[!c]*.py",), ("test_triton", *_ROWS), "triton"),
)


class Mutant(NamedTuple):
    path: str
    line: int  # from 1
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip()}"


_SWAPS = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "//": ("*",),
    "**": ("*",),
    "%": ("//",),
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "&": ("|",),
    "|": ("&",),
    "&&": ("||",),
    "||": ("&&",),
    "and": ("or",),
    "or": ("and",),
    "is": ("is not",),
    "is not": ("is",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("/=",),
    "min": ("max",),
    "max": ("min",),
    "amin": ("amax",),
    "amax": ("amin",),
    "minimum": ("maximum",),
    "maximum": ("minimum",),
    "expm1": ("exp",),
    "True": ("False",),
    "False": ("True",),
    "true": ("false",),
    "false": ("true",),
}


def _other_numbers(text: str) -> tuple[str, ...]:
    digits = text.rstrip("f")
    if digits.isdecimal():
        return (str(int(digits) + 1), *([str(int(digits) - 1)] if int(digits) else []))
    number = float(digits)
    return (repr(2 * number if number else 1.0) + text[len(digits) :],)


class Change(NamedTuple):
    """Columns `start` to `end` of a line, from 1, become `text`."""

    line: int
    start: int
    end: int
    text: str


class _PythonChanges(ast.NodeVisitor):
    """Of what is computed: no annotation, message or import."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.found: list[Change] = []
        self.visit(ast.parse(text))

    def _nothing(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _nothing

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _swap_between(self, left: ast.expr, right: ast.expr) -> None:
        if left.end_lineno != right.lineno:
            return
        start, end = left.end_col_offset or 0, right.col_offset
        operator = self.lines[right.lineno - 1][start:end].strip(" ()")
        column = self.lines[right.lineno - 1].index(operator, start) if operator in _SWAPS else 0
        for text in _SWAPS.get(operator, ()):
            self.found.append(Change(right.lineno, column, column + len(operator), text))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap_between(node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap_between(left, right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self._swap_between(left, right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._swap_between(node.target, node.value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        # An axis -1 is 1 of two; its number is changed all the same.
        is_index = isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int)
        if node.lineno == node.operand.lineno and not is_index:  # removed: -x, ~x and not x
            self.found.append(Change(node.lineno, node.col_offset, node.operand.col_offset, ""))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]
        if isinstance(node.value, bool):
            texts = _SWAPS[text]
        elif isinstance(node.value, int | float):
            texts = _other_numbers(text.replace("_", ""))
        else:
            return
        for other in texts:
            self.found.append(Change(node.lineno, node.col_offset, node.end_col_offset or 0, other))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        self._swap_word(name, node.func.end_lineno or 0, (node.func.end_col_offset or 0) - len(name))
        for keyword in node.keywords:
            self._swap_word(keyword.arg or "", keyword.lineno, keyword.col_offset)
        is_selection = name == "where" and len(node.args) == 3
        if is_selection and node.args[1].lineno == node.args[2].end_lineno:
            first, second = node.args[1:]
            line = self.lines[first.lineno - 1]
            pieces = [line[part.col_offset : part.end_col_offset] for part in (second, first)]
            self.found.append(Change(first.lineno, first.col_offset, second.end_col_offset or 0, ", ".join(pieces)))
        self.generic_visit(node)

    def _swap_word(self, word: str, line: int, column: int) -> None:
        for text in _SWAPS.get(word, ()):
            self.found.append(Change(line, column, column + len(word), text))


# Binary operators stand between spaces, which leaves out pointers, references and templates.
_CPP = re.compile(
    r"(?<= )(?P<operator>[-+*/%<>&|]|[<>=!]=|&&|\|\||[-+*]=)(?= )"
    r"|(?P<removed>(?:(?<=[\s(,])|^)(?:-(?=[A-Za-z_(])|!(?=[A-Za-z_(])))"
    r"|(?<![\w.])(?P<number>\d+\.\d*(?:e[-+]?\d+)?f?|\d+)(?![\w.])"
    r"|\b(?P<word>min|max|true|false|expm1)\b"
)
_CPP_SWAPS = _SWAPS | {"%": ("/",)}
_CPP_SILENT = re.compile(r'^\s*(#|template|using|namespace|static_assert|throw)|"')


def _cpp_changes(text: str) -> list[Change]:
    found = []
    in_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        in_comment = in_comment or "/*" in line
        silent, in_comment = in_comment, in_comment and "*/" not in line
        if silent or _CPP_SILENT.search(line):
            continue
        for match in _CPP.finditer(line.split("//")[0]):
            piece = match.group()
            texts = _other_numbers(piece) if match["number"] else ("",) if match["removed"] else _CPP_SWAPS[piece]
            found += [Change(number, *match.span(), text) for text in texts]
    return found


def mutants(root: Path, source: Source) -> Iterator[Mutant]:
    files = sorted({path for pattern in source.patterns for path in root.glob(pattern)})
    for path in files:
        text = path.read_text()
        changes = _PythonChanges(text).found if path.suffix == ".py" else _cpp_changes(text)
        lines = text.splitlines()
        for change in changes:
            before = lines[change.line - 1]
            after = before[: change.start] + change.text + before[change.end :]
            if after != before:  # where(c, a, a)
                yield Mutant(str(path.relative_to(root)), change.line, before, after)


def equivalent() -> dict[tuple[str, str], set[str] | None]:
    """By path and line the lines after, None for any."""
    found: dict[tuple[str, str], set[str] | None] = {}
    for entry in json.loads(EQUIVALENT.read_text()):
        line = entry["path"], entry["before"]
        if entry["before"] not in map(str.strip, (ROOT / entry["path"]).read_text().splitlines()):
            raise SystemExit(f"{EQUIVALENT.name}: no such line of {entry['path']}: {entry['before']}")
        after = entry.get("after")
        found[line] = None if after is None else (found.get(line) or set()) | set(after)
    return found


def is_equivalent(mutant: Mutant, known: dict[tuple[str, str], set[str] | None]) -> bool:
    after = known.get((mutant.path, mutant.before.strip()), set())
    return after is None or mutant.after.strip() in after


def draw(seed: int, count: int, only: str) -> list[tuple[Mutant, Source]]:
    """As many of each source."""
    numbers = random.Random(seed)
    known = equivalent()
    piles = []
    for source in SOURCES:
        pile = [
            (mutant, source)
            for mutant in mutants(ROOT, source)
            if mutant.path.startswith(only) and not is_equivalent(mutant, known)
        ]
        numbers.shuffle(pile)
        piles.append(pile)
    piles = [pile for pile in piles if pile]
    if not piles:
        raise SystemExit(f"--only {only}: no source of mutants starts with it")
    turns = itertools.zip_longest(*piles)
    return [drawn for turn in turns for drawn in turn if drawn is not None][:count]


class Workshop:
    """A copy of the checkout that is broken and mended again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "rlkernels" / "triton_kernels").symlink_to("../triton_kernels")
        self._configure()
        if not self._build():
            raise SystemExit("the checkout itself does not build")

    def _configure(self) -> None:
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            # twice as fast to build as -O3; an index out of bounds ends the run
            "CMAKE_CXX_FLAGS_RELEASE": "-O1 -D_GLIBCXX_ASSERTIONS -fsanitize=bounds -fsanitize-undefined-trap-on-error",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(self.folder / "rlkernels"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "RLK_CUDA": "OFF",
        }
        defined = [f"-D{key}={value}" for key, value in options.items()]
        command = ["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *defined]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)

    def _build(self) -> bool:
        return subprocess.run(["cmake", "--build", "build"], cwd=self.folder, capture_output=True).returncode == 0

    def verdict(self, mutant: Mutant, source: Source) -> str:
        path = self.folder / mutant.path
        sound = path.read_text()
        lines = sound.splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after + "\n"
        path.write_text("".join(lines))
        try:
            if path.suffix != ".py" and not self._build():
                return "does not build"
            return self._test(source, path.stem)
        finally:
            path.write_text(sound)

    def _test(self, source: Source, module: str) -> str:
        files = [str(path) for name in source.tests for path in sorted(self.folder.glob(f"tests/{name}.py"))]
        files.sort(key=lambda file: module not in file)  # its own tests first
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
        command += ["-k", source.keywords] if source.keywords else []
        own = {
            "PYTHONPATH": f"{self.folder}{os.pathsep}{self.folder / 'tests'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "passive",  # jobs share the cores
        }
        try:
            run = subprocess.run(
                command, cwd=self.folder, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"does not end in {SECONDS} s"
        if run.returncode == NO_TEST_RAN:
            raise SystemExit(f"no test ran: {' '.join(command)}\n{run.stdout[-2000:]}")
        if run.returncode == 0:
            return SURVIVES
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", run.stdout, re.MULTILINE)
        return f"noticed by {failed[1]}" if failed else f"noticed: pytest ends with {run.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", metavar="PATH", help="only files whose path starts with this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at once")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    args = parser.parse_args()
    console = Console()
    drawn = draw(args.seed, args.count, args.only)
    if args.list:
        print(*(mutant for mutant, _ in drawn), sep="\n")
        return 0
    survivors = 0
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*bar, console=console) as progress:
        task = progress.add_task("building", total=len(drawn))
        idle: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        for job in range(args.jobs):
            idle.put(Workshop(Path(folder) / str(job)))

        def judge(mutant: Mutant, source: Source) -> tuple[Mutant, str, float]:
            workshop, start = idle.get(), time.monotonic()
            verdict = workshop.verdict(mutant, source)
            idle.put(workshop)
            return mutant, verdict, time.monotonic() - start

        progress.update(task, description="testing")
        pool = ThreadPoolExecutor(args.jobs)
        try:
            for judged in as_completed([pool.submit(judge, *pair) for pair in drawn]):
                mutant, verdict, seconds = judged.result()
                survivors += verdict == SURVIVES
                console.print(f"{verdict} ({seconds:.0f} s) {mutant}", markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
