"""Draws the figures of the reproductions, one for each published system."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from experiments.benches.result import Row
from experiments.report.data.labels import (
    BLUE,
    COLOURS,
    GREY,
    LIGHT_GREY,
    ORANGE,
    SKY,
    run_line,
)
from experiments.report.figures.picture import picture

_MARKERS = "os^vDP*X<>ph"


def draw_asteroid(
    throughputs: Sequence[Row], losses: Sequence[Row], claimed: tuple[float, float, float], path: Path
) -> None:
    """Draw Asteroid's speed-up in each setting, and the speed-up of its recovery.

    Args:
        throughputs: Rows with ``model``, ``cluster``, ``batch``, ``precision`` and the throughput of each strategy.
        losses: Rows with ``ratio`` and ``ratio_once_known``.
        claimed: The published speed-ups over data and pipeline parallelism, over hybrid pipelines, and of recovery.
        path: A PNG file to write.
    """
    parallel, hybrid, recovery = claimed
    names = [", ".join(str(row[key]) for key in ("model", "cluster", "batch", "precision")) for row in throughputs]
    with picture(path, 2.0 + 0.2 * len(throughputs)) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
        for axes, rivals, bar in (
            (left, ("ddp", "gpipe", "zb-h1-equal"), parallel),
            (middle, ("pipedream", "dapple", "hetpipe"), hybrid),
        ):
            _draw_ratios(axes, throughputs, names, "asteroid", rivals)
            axes.axvline(bar, color=GREY, linestyle=":", label=f"published: up to {bar:g}")
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        middle.set_yticklabels([])
        _draw_recovery(right, losses, recovery)


def _draw_ratios(axes: Axes, rows: Sequence[Row], names: Sequence[str], own: str, rivals: Sequence[str]) -> None:
    """Draw a mark for each row and rival: the throughput of ``own`` divided by the rival's; none if this is 0."""
    colours = cycle(COLOURS)
    for rival, marker, colour in zip(rivals, cycle(_MARKERS), colours, strict=False):
        marks = [(float(row[own]) / float(row[rival]), place) for place, row in enumerate(rows) if float(row[rival])]
        ratios, places = zip(*marks, strict=True) if marks else ((), ())
        axes.plot(ratios, places, color=colour, marker=marker, linestyle="", markersize=4, label=f"to {rival}")
    axes.axvline(1.0, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50]))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel(f"{own}'s throughput ÷ theirs, simulated, each with its best knobs")


def _draw_recovery(axes: Axes, rows: Sequence[Row], claimed: float) -> None:
    for key, colour, label in (("ratio", BLUE, "from the departure"), ("ratio_once_known", SKY, "once it is known")):
        values = sorted((float(row[key]) for row in rows), reverse=True)
        axes.plot(range(1, len(values) + 1), values, color=colour, marker=".", label=label)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.axhline(claimed, color=GREY, linestyle=":", label=f"published: {claimed:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("departures, by ratio")
    axes.set_ylabel("recovery time: heavy rescheduling ÷ replay")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))


# Number of panels side by side.
_COLUMNS = 3

_TRAINED_COLOURS = {"ddp": GREY, "lb-bsp": SKY, "adaptdl": ORANGE, "cannikin": BLUE}


def draw_cannikin(
    times_s: Mapping[str, Mapping[str, float]], batches: Mapping[str, Mapping[str, Sequence[int]]], path: Path
) -> None:
    """Draw the times of all systems, and the batches of the two adaptive systems, into a PNG file.

    Args:
        times_s: Maps a setting and a system to the system's seconds per unit of progress; times are drawn relative to
            those of the first system.
        batches: Maps a setting and a system to the system's samples per step in each part of the run.
        path: The file to write.
    """
    rows = ceil(len(batches) / _COLUMNS)
    with picture(path, 3.0 + 2.4 * rows) as figure:
        grid = figure.add_gridspec(1 + rows, _COLUMNS)
        _draw_times(figure.add_subplot(grid[0, :]), times_s)
        for number, (setting, by_system) in enumerate(batches.items()):
            row, column = divmod(number, _COLUMNS)
            _draw_batches(figure.add_subplot(grid[1 + row, column]), setting, by_system)


def _draw_times(axes: Axes, times_s: Mapping[str, Mapping[str, float]]) -> None:
    first, *_ = systems = list(next(iter(times_s.values())))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        ratios = [by_system[system] / by_system[first] for by_system in times_s.values()]
        places = [place + (number - (len(systems) - 1) / 2) * width for place in range(len(times_s))]
        bars = axes.bar(places, ratios, width, color=_TRAINED_COLOURS[system], label=system)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(times_s)), [setting.replace(" on ", "\n") for setting in times_s])
    axes.set_ylabel(f"time to the target, {first} = 1")
    axes.legend(ncols=len(systems), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_batches(axes: Axes, setting: str, by_system: Mapping[str, Sequence[int]]) -> None:
    for system, line in (("adaptdl", "--"), ("cannikin", "-")):
        batches = by_system[system]
        progress = [100 * part / len(batches) for part in range(len(batches))]
        axes.step(progress, batches, line, where="post", color=_TRAINED_COLOURS[system])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(setting)
    axes.set_xlabel("progress (%)")
    axes.set_ylabel("samples per step")


def draw_cloudless(
    rental: Sequence[Row], exchange: Sequence[Row], claimed: tuple[tuple[float, float], float], path: Path
) -> None:
    """Draw the cost saved in each setting, and each model's speed-up by the number of steps between exchanges.

    Args:
        rental: Rows with ``generations``, ``units``, ``data`` and ``saving``.
        exchange: Rows with ``model``, ``every``, ``asgd_ga`` and ``waiting``.
        claimed: The published range of savings, as shares of the cost, and the published speed-up, a ratio.
        path: The file to write.
    """
    savings, speedup = claimed
    with picture(path, 4.5) as figure:
        left, right = figure.subplots(1, 2)
        _draw_savings(left, rental, savings)
        _draw_speedups(right, exchange, speedup)


def _draw_savings(axes: Axes, rows: Sequence[Row], claimed: tuple[float, float]) -> None:
    labels = [f"{row['units']} + {row['units']}, {row['generations']}, {row['data']}" for row in rows]
    places = range(len(rows))
    axes.axvspan(*claimed, color=LIGHT_GREY, label="published range")
    axes.barh(places, [float(row["saving"]) for row in rows], color=BLUE)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("cost saved, simulated")
    axes.set_title("Elastic scheduling against every GPU (units, kinds, data)")
    axes.legend(loc="lower right")


def _draw_speedups(axes: Axes, rows: Sequence[Row], claimed: float) -> None:
    for index, model in enumerate(dict.fromkeys(str(row["model"]) for row in rows)):
        own = [row for row in rows if row["model"] == model]
        every = [float(row["every"]) for row in own]
        colour, _ = run_line(index)
        axes.plot(every, [float(row["asgd_ga"]) for row in own], color=colour, marker="o", label=model)
        axes.plot(every, [float(row["waiting"]) for row in own], color=colour, linestyle="--")
    axes.axhline(claimed, color=GREY, linestyle=":", label=f"published: up to {claimed:g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([1, 2, 4, 8, 16]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("steps between exchanges")
    axes.set_ylabel("speed-up over an exchange in every step")
    axes.set_title("One exchange under way (solid), none (dashed)")
    axes.legend(loc="upper left")


def draw_deepcee(rows: Sequence[Row], rivals: Sequence[str], claimed: tuple[float, float], path: Path) -> None:
    """Draw DeepCEE's throughput divided by that of each rival, in each setting.

    Args:
        rows: Rows with a ``setting`` and the throughput of each system, 0 for a system that cannot run.
        rivals: Names of the rivals.
        claimed: The published range of ratios.
        path: The file to write.
    """
    with picture(path, 0.35 * len(rows) + 1.5) as figure:
        axes = figure.subplots()
        axes.axvspan(*claimed, color=LIGHT_GREY, label="published range")
        _draw_ratios(axes, rows, [str(row["setting"]) for row in rows], "deepcee", rivals)
        figure.legend(loc="outside upper left", ncols=4)
