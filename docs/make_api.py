"""Writes docs/api/, the reference, from the docstrings:  python docs/make_api.py"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from public_objects import PAGES, ROOT, Entry, Package, Section

COMMAND = "python docs/make_api.py"

_AS_ELSEWHERE = re.compile(
    r"^((?:Args|Returns|Raises|Source)(?:, (?:Args|Returns|Raises|Source))*):(?= )", re.MULTILINE
)
_ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")


class Page:
    """One file of the reference."""

    def __init__(self, package: Package, name: str) -> None:
        self.package, self.name = package, name

    def text(self) -> str:
        title, intro, _ = PAGES[self.name]
        sections = self.package.pages[self.name]
        parts = [f"# {title}", _fenced(intro)]
        parts.append(", ".join(f"[`{entry.name}`](#{entry.anchor})" for each in sections for entry in each.entries))
        for section in sections:
            if section.title is not None:
                parts += [f"## {section.title}", self._prose(section.text, section)]
            for entry in section.entries:
                parts += self._entry(entry, section)
        return _joined(parts)

    def _entry(self, entry: Entry, section: Section) -> Iterator[str]:
        yield f"### `{entry.path}`"
        yield from self._body(entry, section)
        file = Path(entry.object.filepath).relative_to(ROOT)
        yield f"Defined in [{file}](../../{file})."  # no line: every edit above it would make the page stale
        for method in entry.methods:
            yield f"#### `{method.path.removeprefix('rlkernels.')}`"
            yield from self._body(method, section)

    def _body(self, entry: Entry, section: Section) -> Iterator[str]:
        bases = self.package.bases(entry)
        yield f"```python\n{signature(entry, bases)}\n```"
        if bases:
            names = ", ".join(f"`{base.name}`" for base in bases)
            yield f"Base class: {self._prose(names, section)}, whose arguments and errors it shares."
        assert entry.object.docstring is not None
        for part in entry.object.docstring.parsed:
            yield self._part(part, entry, section)

    def _part(self, part: Any, entry: Entry, section: Section) -> str:
        kind, content = part.kind.value, part.value
        if kind == "text":
            return self._prose(content, section)
        if kind == "returns":
            (item,) = content
            own = str(item.annotation) == str(getattr(entry.object, "returns", None))
            text = item.description if own else f"{item.annotation}: {item.description}"  # griffe cuts at a colon
            return f"**Returns**: {self._prose(text, section)}"
        if kind == "admonition" and part.title == "Example":
            return f"**Example**\n\n```python\n{content.contents}\n```"
        titles = {"parameters": "Arguments", "attributes": "Fields", "raises": "Raises"}
        if kind not in titles:
            raise ValueError(f"{entry.path}: no such part of a docstring: {part.title or kind}")
        lines = [f"**{titles[kind]}**", ""]
        for item in content:
            names = str(item.annotation).strip("()") if kind == "raises" else item.name
            text = self._prose(item.description, section).replace("\n", "\n  ")
            lines.append(f"* {', '.join(f'`{name}`' for name in names.split(', '))}: {text}")
        return "\n".join(lines)

    def _prose(self, text: str, section: Section) -> str:
        """With links for public objects, documents and papers, outside of formulas."""

        def linked(match: re.Match[str]) -> str:
            entry = self.package.named(match[1].removesuffix("()"), section.entries)
            return f"[{match[0]}]({self._address(entry)})" if entry else match[0]

        blocks = _fenced(text).split("```")
        for number in range(0, len(blocks), 2):
            prose = _AS_ELSEWHERE.sub(lambda match: f"**{match[1].replace('Args', 'Arguments')}**:", blocks[number])
            prose = re.sub(r"`([\w.]+(?:\(\))?)`", linked, prose)
            prose = re.sub(r"`docs/(\w+\.md)`", r"[`docs/\1`](../\1)", prose)
            blocks[number] = _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", prose)
        return "```".join(blocks)

    def _address(self, entry: Entry) -> str:
        pages = self.package.pages.items()
        (home,) = [page for page, sections in pages if any(entry in section.entries for section in sections)]
        return f"{'' if home == self.name else home + '.md'}#{entry.anchor}"


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _fenced(text: str) -> str:
    """Indented blocks, which are formulas and commands, between fences."""

    def fence(match: re.Match[str]) -> str:
        return f"```text\n{textwrap.dedent(match[0]).rstrip()}\n```\n"

    return re.sub(r"(?:^ {4}.*\n(?:\n(?= {4}))*)+", fence, text.strip("\n") + "\n", flags=re.MULTILINE).rstrip("\n")


def signature(entry: Entry, bases: list[Entry]) -> str:
    """One line where it fits, else one a parameter; a named tuple's fields as they stand in its file."""
    item = entry.object
    if isinstance(item, griffe.Attribute):
        annotation = "" if item.annotation is None else f": {item.annotation}"
        value = "" if "property" in item.labels else f" = {item.value}"
        return f"{entry.name}{annotation}{value if len(value) < 120 else ''}"
    if entry.is_named_tuple:
        fields = [field.lines[0].strip() for field in item.attributes.values()]
        return "\n    ".join([f"class {entry.name}(NamedTuple):", *fields])
    parts, bare_star = [], False
    for parameter in entry.parameters:
        kind = parameter.kind
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        if kind is griffe.ParameterKind.keyword_only and not bare_star:
            parts.append("*")
        bare_star |= kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        default = "" if parameter.default is None or stars else f" = {parameter.default}".replace("'", '"')
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    start = f"class {entry.name}(" if isinstance(item, griffe.Class) else f"{entry.name}("
    end = f") -> {item.returns}" if isinstance(item, griffe.Function) else ")"
    line = start + ", ".join(parts) + end
    inherited = [f"# and the arguments of {base.name}" for base in bases]
    if len(line) <= 100 and not inherited:
        return line
    return "\n    ".join([start, *(f"{part}," for part in parts), *inherited]) + f"\n{end}"


def command_line() -> str:
    """The commands' own help."""
    sys.path.insert(0, str(ROOT))
    from rlkernels.__main__ import _parser

    parser = _parser()
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = ["# Command line", parser.description or "", f"```text\n{parser.prog} {commands.metavar}\n```"]
    for name, command in commands.choices.items():
        items = []
        for action in command._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            shown = " ".join([action.option_strings[0], *([value] if isinstance(value, str) else value)]).strip()
            items.append(f"* `{shown}`: {command._get_formatter()._expand_help(action)}")
        parts += [f"## `{parser.prog} {name}`", command.description or "", "\n".join(items)]
    parts.append("Exit codes: 0 done, 1 failed, 2 bad arguments, 130 interrupted.")
    return _joined(parts)


def index(package: Package) -> str:
    parts = [
        "# API reference",
        f"Written by `{COMMAND}` from the docstrings.",
        "N tokens (rows of logits), V vocabulary, H hidden size, B sequences (responses), T padded length; logarithms "
        "are natural. `Number` and `Normalizer` are a Python number or a tensor, 0-d unless a page says otherwise; "
        "`ObjectiveFunction` is a callable `(logp, batch) -> per-token loss`, `Choice` a recipe's name or an "
        "`Objective`.",
    ]
    for page, sections in package.pages.items():
        parts.append(f"## [{PAGES[page][0]}]({page}.md)")
        for section in sections:
            parts.append(f"**{section.title}**" if section.title else "")
            entries = section.entries
            parts.append("\n".join(f"* [`{each.name}`]({page}.md#{each.anchor}): {each.summary}" for each in entries))
    return _joined([*parts, "## [Command line](cli.md)", "* `python -m rlkernels demo | bench | doctor`"])


def reference() -> dict[str, str]:
    """The text of every file of docs/api/ by its name."""
    package = Package()
    pages = {f"{name}.md": Page(package, name).text() for name in PAGES}
    return {"README.md": index(package), "cli.md": command_line(), **pages}


def main() -> None:
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in reference().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
