"""What the documents say is so: their code runs, their tables are the package's."""

from __future__ import annotations

import doctest
import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

# read once, when TRL is imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import documents
import pytest
import torch
from documents import NOT_RUN, PAGES, ROOT, anchors, blocks, code_spans, commands, links, run_code_blocks, text_of
from torch import Generator, Tensor
from torch.testing import assert_close

import rlkernels
from rlkernels import RECIPES, Objective, PolicyBatch
from rlkernels.__main__ import _parser
from rlkernels.integrations import trl

MODULES = [
    module.name
    for module in pkgutil.walk_packages(rlkernels.__path__, "rlkernels.")
    if not re.search(r"\.(_native|__main__|triton_kernels|cli|integrations)", module.name)
]

LANGUAGES = ("python", "sh", "toml", "text")
OF_OTHERS = ("examples/run_grpo.py",)  # NeMo-RL's


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


OF_A_GROUP = ("docs/distributed.md", "docs/worked/accumulation.md")
WITH_TRL = ("README.md", "docs/trl.md")


# docs/api/ shows docstrings, whose examples test_docstring_examples and the adapters' tests run
@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/api/")])
def test_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in WITH_TRL:
        pytest.importorskip("trl", reason="needs the test extra: pip install -c constraints.txt -e '.[test]'")
    monkeypatch.chdir(tmp_path)  # a page may write files
    if page in OF_A_GROUP:  # of one process here
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            monkeypatch.setenv(name, value)
    try:
        run_code_blocks(page)
    finally:
        trl.unpatch()


@pytest.mark.slow
def test_the_plain_loop_on_two_ranks() -> None:
    """As its page says: torchrun, gloo. tests/test_distributed.py runs docs/distributed.md on two and four."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(ROOT / "tests" / "documents.py"), "docs/worked/accumulation.md"]
    ran = subprocess.run([*torchrun, *program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("reward") == 2  # the first rank's


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", AssertionError),
        ("```python\n>>> 1 + 1\n3\n```\n", AssertionError),
        ("```python\nimport runpy, ray\ndef\n```\n", SyntaxError),
    ],
    ids=["program", "doctest", "what does not run"],
)
def test_a_wrong_page_fails(text: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"# Page\n\n{text}")
    with pytest.raises(error):
        run_code_blocks("page.md")
    (tmp_path / "page.md").write_text("```python\nassert True\n```\n\n```python\n>>> 1 + 1\n2\n```\n")
    run_code_blocks("page.md")


def test_what_does_not_run_is_there() -> None:
    first_lines = {block.first for page in PAGES for block in blocks(page)}
    assert first_lines >= set(NOT_RUN)


def test_every_block_names_its_language() -> None:
    """A block of Python without a name would not run."""
    found = {(page, block.line) for page in PAGES for block in blocks(page) if block.language not in LANGUAGES}
    assert found == set()
    for page in PAGES:
        assert len(re.findall(r"^ *```", text_of(page), flags=re.MULTILINE)) == 2 * len(blocks(page)), page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists() and ROOT in target.resolve().parents, link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", PAGES)
def test_paths_are_there(page: str) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"(tests|examples|bench|csrc|docs|rlkernels|triton_kernels)/[\w./]*", span):
            assert span in OF_OTHERS or (ROOT / span).exists(), span


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    for command in commands(page):
        words = re.sub(r"^([A-Z_]+=\S+ )+", "", command).split()
        if words[:3] == ["python", "-m", "rlkernels"]:
            _check_command_line(words[3:])
        elif words[:2] == ["python", "-m"]:
            assert f"\n{words[2]}==" in text_of("constraints.txt"), command
        elif words[:1] == ["python"]:
            script = ROOT / words[1]
            assert script.exists(), command
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in script.read_text(), command
        elif words[:1] == ["pytest"]:
            for path in (word for word in words if word.startswith("tests/")):
                stem, names, rest = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", path).groups()  # type: ignore[union-attr]
                for name in (names or "").split(","):
                    assert (ROOT / f"{stem}{name}{rest}").exists(), command
        elif words[:2] == ["pip", "install"]:
            for option, file in itertools.pairwise(words):
                assert option not in ("-c", "-r") or (ROOT / file).exists(), command
            for extra in re.findall(r"(?<!\w)\.\[(\w+)\]", command):
                assert f"\n{extra} = [" in text_of("pyproject.toml"), command


def _check_command_line(words: list[str]) -> None:
    """The options are some command's; where a value is a placeholder it is not looked at."""
    commands = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    names = [word for word in words if word in commands]
    assert names, words
    for word in words:
        assert not word.startswith("--") or word in commands[names[0]]._option_string_actions, words


def recipe_table() -> str:
    """One row a recipe; of the fields, those that differ from the base class's defaults."""
    lines = ["| recipe | objective | reduction | the batch must hold |", "|---|---|---|---|"]
    for name, (objective, reduction, normalizer, needs, _) in RECIPES.items():
        base = {field.name: field.default for field in fields(Objective)}
        values = {field.name: getattr(objective, field.name) for field in fields(objective)}
        shown = ", ".join(
            f"{key}={value!r}" for key, value in values.items() if value is not None and base.get(key) != value
        )
        reduction = f"{reduction} / {normalizer:g}" if normalizer else reduction
        needs = {"nft": 'extras["success_rate"]', "dr_grpo": "(normalizer=...)"}.get(name, needs or "")
        lines.append(f"| `{name}` | `{type(objective).__name__}({shown})` | {reduction} | {needs} |")
    return "\n".join(lines)


def test_recipe_table_is_current() -> None:
    assert recipe_table() in (ROOT / "docs" / "recipes.md").read_text()


def rows_of_table(page: str, first_heading: str) -> list[list[str]]:
    """The cells of a table, of whose header this is the first."""
    _, _, table = text_of(page).partition(f"\n| {first_heading} |")
    rows = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[2:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_objectives_of_the_readme(generator: Generator) -> None:
    """Each formula is evaluated as it stands there, beside the recipe: value and gradient."""
    rows = rows_of_table("README.md", "recipe")
    assert [name.strip("`") for name, *_ in rows] == list(RECIPES)
    for cell, formula, reduction, _ in rows:
        name = cell.strip("`")
        recipe = RECIPES[name]
        wanted = f"{recipe.reduction} / {recipe.normalizer:g}" if recipe.normalizer else recipe.reduction
        assert reduction == wanted, name
        _check_formula(name, re.findall(r"`([^`]+)`", formula)[0], generator)


FUNCTIONS = {
    "min": lambda x, bound: torch.minimum(x, torch.as_tensor(bound, dtype=x.dtype)),
    "max": lambda x, bound: torch.maximum(x, torch.as_tensor(bound, dtype=x.dtype)),
    "clip": torch.clamp,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sigmoid": torch.sigmoid,
    "where": torch.where,
    "mean": lambda x: x.mean(1, keepdim=True),
    "sg": torch.Tensor.detach,
}


def _check_formula(name: str, formula: str, generator: Generator) -> None:
    def draw() -> Tensor:
        return torch.randn(6, 5, generator=generator, dtype=torch.float64)

    logp = (-draw().abs()).requires_grad_()
    old_logp, advantages = logp.detach() - 0.5 * draw(), draw()[:, :1]
    rate, count = draw().abs()[:, :1].clamp(0.2, 0.7), draw().abs().ceil()
    weight = 1 / count if name == "lambda_grpo" else None
    batch = PolicyBatch(None, advantages, old_logp=old_logp, weight=weight, extras={"success_rate": rate})
    loss = rlkernels.logp_policy_loss(logp, batch, name, reduction="none").loss
    (gradient,) = torch.autograd.grad(loss.sum(), logp)

    def value(choice: Tensor) -> Tensor:
        d = logp - old_logp
        r, s, w = d.exp(), d.mean(1, keepdim=True).exp(), d.sum(1, keepdim=True).exp()
        names = {"logp": logp, "d": d, "r": r, "s": s, "w": w, "A": advantages, "q": rate, "c": count, "j": choice}
        names["u"] = s.detach() * r / r.detach()
        names["tau"] = torch.ones_like(advantages).masked_fill(advantages <= 0, 1.05)
        names["k"], names["n"] = torch.where(advantages < 0, 3.0, 2.0), torch.where(advantages < 0, 2.0, 3.0)
        return eval(formula, {"__builtins__": {}}, FUNCTIONS | names).expand_as(logp)

    # j is the objective's own choice of tokens: 0 or 1, whichever gives its value
    off, on = (value(torch.full_like(logp, number)).detach() for number in (0.0, 1.0))
    choice = torch.isclose(on, loss, rtol=1e-9, atol=1e-12).double()
    assert_close(torch.where(choice == 1, on, off), loss.detach())
    assert choice.sum() > 0 if re.search(r"\bj\b", formula) else choice.all(), name
    if name != "nft":  # whose maximum passes its gradient straight through
        (of_formula,) = torch.autograd.grad(value(choice).sum(), logp)
        assert_close(of_formula, gradient, msg=lambda text: f"{name}: {text}")


def test_versions_of_the_readme() -> None:
    """What was tested is what `constraints.txt` pins and what the workflow runs."""
    project, pinned = text_of("pyproject.toml"), text_of("constraints.txt")
    rows = {name.lower(): (declared, tested) for name, declared, tested in rows_of_table("README.md", "version")}
    assert list(rows) == ["python", "torch", "triton", "trl"]
    for name, (declared, tested) in rows.items():
        bound = declared.replace(" ", "")
        if name == "python":
            assert f'requires-python = "{bound}"' in project
            assert f'python-version: "{tested}"' in text_of(".github/workflows/tests.yml")
        else:
            assert f'"{name}{bound}' in project and f"\n{name}=={tested.partition(';')[0]}\n" in pinned, name


def test_every_page_is_in_the_index() -> None:
    """But for the generated reference, which has an index of its own."""
    listed = {f"docs/{link.partition('#')[0]}" for link in links("docs/README.md")}
    pages = {page for page in PAGES if re.match(r"docs/(?!api|README)", page)}
    assert pages <= listed
