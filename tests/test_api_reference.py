"""The reference in docs/api/ is the docstrings', and each docstring says what a caller has to know."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

import rlkernels
from rlkernels import credit, testing

griffe = pytest.importorskip("griffe", reason="needs the test extra: pip install -c constraints.txt -e '.[test]'")

sys.path.insert(0, str(ROOT / "docs"))
make_api = importlib.import_module("make_api")
public_objects = importlib.import_module("public_objects")

PACKAGE = public_objects.Package()
TOP = {entry.path: entry for entry in PACKAGE.entries}
ENTRIES = TOP | {method.path: method for entry in PACKAGE.entries for method in entry.methods}
CALLABLES = {path: entry for path, entry in ENTRIES.items() if not isinstance(entry.object, griffe.Attribute)}
CLASSES = {path: entry for path, entry in TOP.items() if isinstance(entry.object, griffe.Class)}

NO_EXAMPLE = {
    "rlkernels.Objective": "a base class; its subclasses have one",
    "rlkernels.testing.Comparison": "what a function returns, whose example shows it",
}
NO_FORMULA = {
    "rlkernels.credit.prefix_tree": "an algorithm",
    "rlkernels.credit.tool_output_mask": "an algorithm",
}
NO_SOURCE = {"rlkernels.Objective": "fields that objectives of several sources share"}


def is_of_the_literature(entry: Any) -> bool:
    """An objective or a method of credit, not what a method returns."""
    is_objective = "rlkernels.Objective" in (entry.path, *(base.path for base in ancestors(entry)))
    return is_objective or (entry.path.startswith("rlkernels.credit.") and not entry.is_named_tuple)


def ancestors(entry: Any) -> Iterator[Any]:
    for base in PACKAGE.bases(entry):
        yield base
        yield from ancestors(base)


OF_THE_LITERATURE = [path for path, entry in TOP.items() if path in CALLABLES and is_of_the_literature(entry)]
USED = [path for path, entry in TOP.items() if path in CALLABLES and not entry.is_named_tuple]

each_callable = pytest.mark.parametrize("path", CALLABLES)


def test_the_pages_are_current() -> None:
    pages = make_api.reference()
    folder = ROOT / "docs" / "api"
    assert sorted(pages) == sorted(path.name for path in folder.iterdir()), f"run {make_api.COMMAND}"
    for name, text in pages.items():
        assert (folder / name).read_text() == text, f"docs/api/{name} is not the docstrings': run {make_api.COMMAND}"


@pytest.mark.parametrize("module", [rlkernels, credit], ids=lambda module: module.__name__)
def test_everything_public_is_in_the_reference(module: Any) -> None:
    assert {f"{module.__name__}.{name}" for name in module.__all__} <= set(ENTRIES)


def test_the_tools_of_diagnosis_are_in_the_reference() -> None:
    own = {name for name, value in vars(testing).items() if getattr(value, "__module__", None) == testing.__name__}
    assert {f"rlkernels.testing.{name}" for name in own if not name.startswith("_")} <= set(ENTRIES)


def test_every_link_has_an_aim() -> None:
    pages = make_api.reference()
    anchors = {
        name: {re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.split("\n")}
        for name, text in pages.items()
    }
    for name, text in pages.items():
        for address in re.findall(r"\]\(([^)]*)\)", text):
            file, _, anchor = address.partition("#")
            if file.startswith("https://"):
                continue
            assert not file or (ROOT / "docs" / "api" / file).exists(), f"{name}: {address}"
            assert not anchor or anchor in anchors[file or name], f"{name}: {address}"


@pytest.mark.parametrize("name", ["head", "replay"])
def test_examples_of_trls_adapter(name: str) -> None:
    pytest.importorskip("trl")
    result = doctest.testmod(importlib.import_module(f"rlkernels.integrations.trl.{name}"))
    assert result.failed == 0 and result.attempted > 0


@pytest.mark.parametrize("path", ENTRIES)
def test_the_first_line_is_one_sentence(path: str) -> None:
    lines = ENTRIES[path].object.docstring.value.split("\n")
    assert re.fullmatch(r"(?!.*\. [A-Z]).*\.", lines[0]), lines[0]
    assert len(lines) == 1 or not lines[1], "expected an empty line after the first sentence"


@each_callable
def test_every_argument_is_named_and_no_other(path: str) -> None:
    entry = CALLABLES[path]
    if entry.is_named_tuple:
        fields = entry.object.attributes.values()
        text = entry.object.docstring.value
        unnamed = {field.name for field in fields if "#" not in field.lines[0] and field.name not in text}
    else:
        unnamed = {parameter.name for parameter in entry.parameters} - _documented(entry)
    assert not unnamed
    assert _own_names(entry) <= {parameter.name for parameter in entry.object.parameters} | set(entry.object.members)


@each_callable
def test_it_says_what_it_returns(path: str) -> None:
    entry = CALLABLES[path]
    if isinstance(entry.object, griffe.Function) and str(entry.object.returns) != "None":
        assert _says("Returns", entry)


@each_callable
def test_it_says_what_it_raises(path: str) -> None:
    if _raises(CALLABLES[path]):
        assert _says("Raises", CALLABLES[path])


@pytest.mark.parametrize("path", [path for path in USED if path not in NO_EXAMPLE])
def test_there_is_an_example_of_it(path: str) -> None:
    lines = re.findall(r"^ *(?:>>>|\.\.\.) (.*)", TOP[path].object.docstring.value, flags=re.MULTILINE)
    uses = [line for line in lines if not re.match("from |import ", line)]
    assert any(re.search(rf"\b{TOP[path].name}\b", line) for line in uses)


@pytest.mark.parametrize("path", [path for path in OF_THE_LITERATURE if path not in NO_FORMULA])
def test_there_is_a_formula(path: str) -> None:
    assert re.search(r"\n\n {4}\S", TOP[path].object.docstring.value)


@pytest.mark.parametrize("path", [path for path in OF_THE_LITERATURE if path not in NO_SOURCE])
def test_there_is_a_source(path: str) -> None:
    assert re.search(r"^(?:\w+, )*Source: ", TOP[path].object.docstring.value, flags=re.MULTILINE)


@pytest.mark.parametrize("path", CLASSES)
def test_a_method_without_docstring_does_what_a_base_class_says(path: str) -> None:
    entry = CLASSES[path]
    public = {name for name, member in entry.object.members.items() if member.is_function and not name.startswith("_")}
    said = {method.name for each in (entry, *ancestors(entry)) for method in each.methods}
    assert public <= said | {internal.rpartition(".")[2] for internal in public_objects.INTERNAL}


@pytest.mark.parametrize("exceptions", [NO_EXAMPLE, NO_FORMULA, NO_SOURCE])
def test_no_exception_outlives_its_object(exceptions: dict[str, str]) -> None:
    assert set(exceptions) <= set(TOP)


def _parts(entry: Any, kind: str) -> list[Any]:
    return [part.value for part in entry.object.docstring.parsed if part.kind.value == kind]


def _own_names(entry: Any) -> set[str]:
    """Those of Args: and Attributes:, several of which may stand before one colon."""
    items = [item for kind in ("parameters", "attributes") for part in _parts(entry, kind) for item in part]
    return {name for item in items for name in item.name.split(", ")}


def _documented(entry: Any) -> set[str]:
    return _own_names(entry).union(*map(_documented, (*_named_for("Args", entry), *PACKAGE.bases(entry))))


def _says(what: str, entry: Any) -> bool:
    if _parts(entry, what.lower()):
        return True
    others = [*_named_for(what, entry), *(PACKAGE.bases(entry) if what == "Raises" else ())]
    return any(_says(what, other) for other in others)


def _named_for(what: str, entry: Any) -> Iterator[Any]:
    """Whom a docstring names in a line such as "Returns, Raises: as `policy_loss`."."""
    pattern = rf"^(?:\w+, )*{what}(?:, \w+)*: as (?:in )?`([\w.]+)`"
    for name in re.findall(pattern, entry.object.docstring.value, flags=re.MULTILINE):
        near = [other for path, other in TOP.items() if path.rpartition(".")[0] == entry.path.rpartition(".")[0]]
        other = PACKAGE.named(name, near)
        assert other is not None and other != entry, f"{what}: as `{name}`, which is not in the reference"
        yield other


_CHECK = re.compile(r"_?(?:require|check|refuse|agree)(?:_|$)")


def _raises(entry: Any) -> bool:
    """Whether its own file shows that it raises: by `raise`, by a check, or in what of the file it calls."""
    functions = _functions(entry.object.filepath)
    own = entry.object.path.removeprefix(entry.object.module.path + ".")
    ways = {name: node for name, node in functions.items() if name == own or name.rpartition(".")[0] == own}
    if isinstance(entry.object, griffe.Class):
        ways = {name: node for name, node in ways.items() if re.search(r"\.__(init|post_init|call)__$", name)}
    seen: set[str] = set()
    pending = list(ways)
    while pending:
        name = pending.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Raise):
                return True
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if _CHECK.match(called):
                    return True
                pending.append(called if isinstance(node.func, ast.Name) else f"{name.rpartition('.')[0]}.{called}")
    return False


@cache
def _functions(path: Path) -> dict[str, ast.AST]:
    """A file's functions and methods, by their names in it."""
    found: dict[str, ast.AST] = {}

    def collect(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")

    collect(ast.parse(path.read_text()).body, "")
    return found
