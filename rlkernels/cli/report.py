"""From pytest-benchmark's JSON to Markdown tables and plots."""

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


class Point(NamedTuple):
    """One candidate at one number of tokens."""

    title: str
    name: str
    tokens: int
    seconds: float  # median
    extra_bytes: int
    is_subject: bool


def write(results: Path) -> list[Path]:
    """Writes results.md beside `results` and, where matplotlib is installed, results.png of the comparisons and
    scaling.png of what was measured as tokens grow; returns their paths."""
    data = json.loads(results.read_text())
    rows, points = list(_rows(data)), list(_points(data))
    markdown = results.with_suffix(".md")
    markdown.write_text(_markdown(data, rows, points))
    bars, lines = results.with_suffix(".png"), results.with_name("scaling.png")
    for picture in (bars, lines):
        picture.unlink(missing_ok=True)  # of an earlier run
    try:
        import matplotlib
    except ImportError:
        return [markdown]
    matplotlib.use("Agg")
    origin = f"{_machine(data)['machine']}, {_date(data)}"
    written = [markdown]
    if rows:
        _plot(rows, origin, bars)
        written.append(bars)
    if points:
        _plot_scaling(points, origin, lines)
        written.append(lines)
    return written


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


def _points(data: dict[str, Any]) -> Iterator[Point]:
    for benchmark in data["benchmarks"]:
        scaling = benchmark["extra_info"].get("scaling")
        if scaling is None:
            continue
        subject = scaling["subject"]
        medians = {subject: benchmark["stats"]["median"], **scaling["other_medians"]}
        for name, seconds in medians.items():
            extra = scaling["extra_bytes"][name]
            yield Point(scaling["title"], name, scaling["tokens"], seconds, extra, name == subject)


def _machine(data: dict[str, Any]) -> dict[str, Any]:
    return data["machine_info"]["rlkernels"]


def _date(data: dict[str, Any]) -> str:
    return data["datetime"][:10]


def _markdown(data: dict[str, Any], rows: list[Row], points: list[Point]) -> str:
    lines = ["# Benchmarks", ""]
    lines += [f"- {label}: {value}" for label, value in _machine(data).items() if label != "quick"]
    lines += [f"- date: {_date(data)}", ""]
    if _machine(data)["quick"]:
        lines += ["**Small shapes: these figures mean nothing.**", ""]
    lines += _time_table(rows) + _memory_tables(data) + _scaling_table(points)
    unavailable = (b["extra_info"].get("unavailable", {}) for b in data["benchmarks"])
    # each once, though several benchmarks did without
    lines += dict.fromkeys(f"Not measured: {name}: {reason}" for entry in unavailable for name, reason in entry.items())
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


def _memory_tables(data: dict[str, Any]) -> list[str]:
    measured = defaultdict(list)
    for benchmark in data["benchmarks"]:
        if "memory" in benchmark["extra_info"]:
            entry = benchmark["extra_info"]["memory"]
            measured[entry["title"]].append(entry)
    lines = []
    for title, entries in measured.items():
        counts = list(entries[0]["extra_bytes"])
        lines += [
            f"Peak memory of forward + backward beyond the inputs and their gradients, {title}.",
            "",
            f"| loss | {' | '.join(f'N = {count}' for count in counts)} |",
            f"|---|{'---:|' * len(counts)}",
        ]
        for entry in entries:
            named = {entry["loss"]: entry["extra_bytes"], "its bound": entry.get("bound_bytes")}
            for name, values in named.items():
                if values is not None:
                    lines.append(f"| {name} | {' | '.join(_mib(values[count]) for count in counts)} |")
        lines.append("")
    return lines


def _scaling_table(points: list[Point]) -> list[str]:
    if not points:
        return []
    lines = [
        f"{points[0].title}: medians of calls that took turns, and peak memory beyond the inputs and their gradients.",
        "",
        "| N | | median | a token | memory |",
        "|---:|---|---:|---:|---:|",
    ]
    for point in points:
        count = str(point.tokens) if point.is_subject else ""
        times = (_time(point.seconds), _time(point.seconds / point.tokens))
        lines.append(f"| {' | '.join((count, point.name, *times, _mib(point.extra_bytes)))} |")
    return [*lines, ""]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    """Three significant digits: `12.3 ms`."""
    scale, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"


def _plot(rows: list[Row], origin: str, path: Path) -> None:
    """One panel for each comparison: the candidates' times relative to the baseline's."""
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.title].append(row)
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
    figure.suptitle(f"Median time relative to the dotted line\n{origin}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_scaling(points: list[Point], origin: str, path: Path) -> None:
    """Time and extra memory against the number of tokens, a line for each candidate."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    counts = sorted({point.tokens for point in points})
    panels = (
        ("time (s)", lambda point: point.seconds),
        ("extra memory (MiB)", lambda point: point.extra_bytes / 2**20),
    )
    for axis, (label, value) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(point.name for point in points):
            line = [point for point in points if point.name == name]
            axis.plot([point.tokens for point in line], [value(point) for point in line], marker="o", label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens N")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(f"{points[0].title}\n{origin}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
