"""From pytest-benchmark's JSON to a Markdown table and a plot."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class Row(NamedTuple):
    """One candidate of one comparison."""

    title: str
    name: str
    seconds: float  # median
    tokens: int
    relative: float  # to the baseline's median
    is_subject: bool


def write(results: Path) -> list[Path]:
    """Writes results.md beside `results`, and results.png where matplotlib is installed; returns their paths."""
    data = json.loads(results.read_text())
    rows = list(_rows(data))
    markdown = results.with_suffix(".md")
    markdown.write_text(_markdown(data, rows))
    try:
        import matplotlib
    except ImportError:
        return [markdown]
    matplotlib.use("Agg")
    picture = results.with_suffix(".png")
    _plot(rows, _machine(data)["machine"], picture)
    return [markdown, picture]


def _rows(data: dict[str, Any]) -> Iterator[Row]:
    for benchmark in data["benchmarks"]:
        comparison = benchmark["extra_info"].get("comparison")
        if comparison is None:
            continue
        subject = comparison["subject"]
        medians = {subject: benchmark["stats"]["median"], **comparison["other_medians"]}
        for name, seconds in medians.items():
            relative = seconds / medians[comparison["baseline"]]
            yield Row(comparison["title"], name, seconds, comparison["tokens"], relative, name == subject)


def _machine(data: dict[str, Any]) -> dict[str, Any]:
    return data["machine_info"]["rlkernels"]


def _markdown(data: dict[str, Any], rows: list[Row]) -> str:
    lines = ["# Benchmarks", ""]
    lines += [f"- {label}: {value}" for label, value in _machine(data).items() if label != "quick"]
    lines += [f"- date: {data['datetime'][:10]}", ""]
    if _machine(data)["quick"]:
        lines += ["**Small shapes: these figures mean nothing.**", ""]
    lines += _time_table(rows) + _memory_table(data)
    lines += [
        f"Not measured: {name}: {reason}"
        for benchmark in data["benchmarks"]
        for name, reason in benchmark["extra_info"].get("unavailable", {}).items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _time_table(rows: list[Row]) -> list[str]:
    lines = [
        "Medians of calls that took turns; ratios to the median of the line that says 1.00.",
        "",
        "| benchmark | | median | a token | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        title = row.title if row.is_subject else ""
        cells = (title, row.name, _time(row.seconds), _time(row.seconds / row.tokens), f"{row.relative:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if rows else []


def _memory_table(data: dict[str, Any]) -> list[str]:
    measured = [b["extra_info"]["memory"] for b in data["benchmarks"] if "memory" in b["extra_info"]]
    if not measured:
        return []
    counts = list(measured[0]["extra_bytes"])
    lines = [
        f"Peak memory of forward + backward beyond the logits and their gradient, {measured[0]['title']}.",
        "",
        f"| loss | {' | '.join(f'N = {count}' for count in counts)} |",
        f"|---|{'---:|' * len(counts)}",
    ]
    for entry in measured:
        cells = (f"{entry['extra_bytes'][count] / 2**20:.1f} MiB" for count in counts)
        lines.append(f"| {entry['loss']} | {' | '.join(cells)} |")
    return [*lines, ""]


def _time(seconds: float) -> str:
    """Three significant digits: `12.3 ms`."""
    scale, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"


def _plot(rows: list[Row], machine: str, path: Path) -> None:
    """One panel for each comparison: the candidates' times relative to the baseline's."""
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.title].append(row)
    if not panels:
        return
    figure, axes = pyplot.subplots(
        len(panels),
        squeeze=False,
        figsize=(8, 0.8 + sum(0.55 + 0.32 * len(panel) for panel in panels.values())),
        height_ratios=[0.55 + 0.32 * len(panel) for panel in panels.values()],
        layout="constrained",
    )
    for axis, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        colors = ["tab:blue" if row.is_subject else "silver" for row in panel]
        bars = axis.barh([row.name for row in panel], [row.relative for row in panel], color=colors)
        axis.bar_label(bars, [f"{row.relative:.2f}   ({_time(row.seconds)})" for row in panel], padding=4)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlim(0, 1.35 * max(row.relative for row in panel))
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    figure.suptitle(f"Median time relative to the dotted line\n{machine}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
