"""What of the package is public, and on which page of docs/api/ it stands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import griffe

ROOT = Path(__file__).resolve().parent.parent

# page: title, what stands below it, and the objects in their order; a module stands for all that it makes public
PAGES: dict[str, tuple[str, str, list[str]]] = {
    "losses": (
        "Losses",
        "From logits, hidden states or log-probabilities to a loss with exact gradients, and its metrics.",
        [
            "rlkernels.policy_loss",
            "rlkernels.linear_policy_loss",
            "rlkernels.logp_policy_loss",
            "rlkernels.PolicyLoss",
            "rlkernels.Metrics",
            "rlkernels.losses.logp_policy_terms",
            "rlkernels.objectives.PolicyTerms",
        ],
    ),
    "batch": (
        "Batches and denominators",
        "What a loss knows of its tokens, and what their losses are divided by.",
        ["rlkernels.PolicyBatch", "rlkernels.REDUCTIONS", "rlkernels.global_normalizer"],
    ),
    "statistics": (
        "Statistics of tokens",
        "What losses are made of, without a loss.",
        ["rlkernels.token_stats", "rlkernels.linear_token_stats", "rlkernels.TokenStats", "rlkernels.head_arguments"],
    ),
    "objectives": (
        "Objectives",
        "One frozen dataclass each, keyword-only. Recipes are names for an objective and a reduction: see "
        "[recipes](../recipes.md). In the formulas\n\n"
        "    r = exp(logp - old_logp)     A = advantage     m = mask     n = sum_t m of the token's sequence\n\n"
        "and sg[x] is x without its gradient.",
        [
            "rlkernels.Objective",
            "rlkernels.GRPO",
            "rlkernels.GSPO",
            "rlkernels.GSPOToken",
            "rlkernels.LUSPO",
            "rlkernels.GMPO",
            "rlkernels.CISPO",
            "rlkernels.SAPO",
            "rlkernels.NFT",
            "rlkernels.Reinforce",
            "rlkernels.VESPO",
            "rlkernels.DPPO",
            "rlkernels.DRO",
            "rlkernels.ClipCov",
            "rlkernels.KLCov",
            "rlkernels.RECIPES",
            "rlkernels.objectives.Tokens",
        ],
    ),
    "credit": ("Credit", "From rewards to advantages and weights, `rlkernels.credit`.", ["rlkernels.credit"]),
    "backends": (
        "Backends, checks and memory",
        "Which kernels run, what is checked, and where large buffers come from.",
        [
            "rlkernels.backend",
            "rlkernels.set_backend",
            "rlkernels.backends.why_unavailable",
            "rlkernels.set_checks",
            "rlkernels.empty_cache",
        ],
    ),
    "distributed": ("Many processes", "See [distributed](../distributed.md).", ["rlkernels.distributed.full_weight"]),
    "testing": (
        "Diagnosis",
        "What a batch of your own does on every backend.",
        [
            "rlkernels.testing.compare_with_reference",
            "rlkernels.testing.Comparison",
            "rlkernels.testing.NonFinite",
            "rlkernels.testing.Deviation",
            "rlkernels.testing.save_call",
            "rlkernels.testing.load_call",
        ],
    ),
    "integrations": (
        "Integrations",
        "Adapters for trainers; each imports its trainer when it is used. See [trainers](../trainers.md) and "
        "[verl](../verl.md).",
        [
            "rlkernels.integrations.trl",
            "rlkernels.integrations.verl",
            "rlkernels.integrations.openrlhf",
            "rlkernels.integrations.skyrl",
            "rlkernels.integrations.slime",
            "rlkernels.integrations.nemo_rl",
            "rlkernels.integrations.prime_rl",
            "rlkernels.integrations.areal",
        ],
    ),
}

# for the package's own layers, whatever their names
INTERNAL = {
    "rlkernels.PolicyBatch.check_against",
    "rlkernels.PolicyBatch.per_token",
    "rlkernels.Objective.kind",
}


class Entry(NamedTuple):
    """Something public: where it is imported from, and what griffe has read of it."""

    path: str
    object: griffe.Object

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def anchor(self) -> str:
        """GitHub's, of a heading that is the path."""
        return self.path.replace(".", "").lower()

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        assert self.object.docstring is not None, f"{self.path} has no docstring"
        return self.object.docstring.value.partition("\n")[0]

    @property
    def is_named_tuple(self) -> bool:
        return isinstance(self.object, griffe.Class) and "NamedTuple" in map(str, self.object.bases)

    @property
    def methods(self) -> list[Entry]:
        """Those with a docstring: others do what a base class says."""
        if not isinstance(self.object, griffe.Class):
            return []
        public = [(name, member) for name, member in self.object.members.items() if not name.startswith("_")]
        entries = [Entry(f"{self.path}.{name}", method) for name, method in public if method.has_docstring]
        return [entry for entry in entries if entry.path not in INTERNAL]

    @property
    def parameters(self) -> list[griffe.Parameter]:
        """A call's, without those that a dataclass inherits unchanged."""
        item = self.object
        parameters = [parameter for parameter in item.parameters if parameter.name not in ("self", "cls")]
        if isinstance(item, griffe.Class) and "dataclass" in item.labels:
            return [parameter for parameter in parameters if parameter.name in item.members]
        return parameters


class Section(NamedTuple):
    """Of a page: objects, under their module's docstring where a page has several modules."""

    entries: list[Entry]
    title: str | None = None
    text: str = ""


class Package:
    """The package as griffe reads it, without importing it."""

    def __init__(self) -> None:
        options = {"returns_named_value": False, "returns_multiple_items": False, "warnings": False}
        self.module: Any = griffe.load(
            "rlkernels",
            search_paths=[ROOT],
            try_relative_path=False,
            docstring_parser="google",
            docstring_options=options,
        )

    @cached_property
    def pages(self) -> dict[str, list[Section]]:
        return {page: list(self._sections(paths)) for page, (_, _, paths) in PAGES.items()}

    @cached_property
    def entries(self) -> list[Entry]:
        return [entry for sections in self.pages.values() for section in sections for entry in section.entries]

    def named(self, name: str, near: list[Entry]) -> Entry | None:
        """What a docstring calls by this name, if it is public: something near before anything else."""
        return next((entry for entry in (*near, *self.entries) if name in (entry.name, entry.path)), None)

    def bases(self, entry: Entry) -> list[Entry]:
        """A class's own bases that are in the reference."""
        if not isinstance(entry.object, griffe.Class):
            return []
        paths = {base.path for base in entry.object.resolved_bases}
        return [other for other in self.entries if other.object.path in paths]

    def _sections(self, paths: list[str]) -> Iterator[Section]:
        if not self._find(paths[0]).is_module:
            yield Section([Entry(path, self._find(path)) for path in paths])
            return
        for path in paths:
            module = self._find(path)
            entries = [Entry(f"{path}.{name}", self._find(f"{path}.{name}")) for name in _public_names(module)]
            if len(paths) > 1:
                yield Section(entries, f"`{path}`", module.docstring.value)
                continue
            for _, file in sorted(module.modules.items()):
                defined = [entry for entry in entries if entry.object.module is file]
                title, _, text = file.docstring.value.partition("\n")
                if defined:
                    yield Section(defined, title.removesuffix("."), text)

    def _find(self, path: str) -> Any:
        parent, _, name = path.partition(".")[2].rpartition(".")
        module = self.module[parent] if parent else self.module
        found = module.members.get(name)
        # a function of its file's name, or what a module's __getattr__ imports when it is asked for
        if name in (module.exports or ()) and (found is None or found.is_module):
            (found,) = [file.members[name] for file in module.modules.values() if _defines(file, name)]
        return found.final_target if found.is_alias else found


def _defines(file: griffe.Module, name: str) -> bool:
    return name in file.members and not file.members[name].is_alias


def _public_names(module: griffe.Module) -> list[str]:
    """A module's `__all__`; without one, its functions, classes and documented constants."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    own = {name: member for name, member in module.members.items() if not name.startswith("_") and not member.is_alias}
    return [name for name, member in own.items() if member.is_function or member.is_class or member.has_docstring]
