"""The page and the figure of a sweep: what they show is what its table says."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benches.report import browser, complaints, missing, open_page
from experiments.report.data.sweep_points import SweptMetric, SweptPoints, heat, pareto_front, read_swept_points
from experiments.report.html.sweep_page import write_sweep_page
from tests.helpers.processes.command import ropebridge
from traces.common.errors import InputError

# Its costly fixtures are made once.
pytestmark = pytest.mark.xdist_group("report of a sweep")

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

needs_browser = pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()}")

SWEEP = """
scenario: two-regions
strategy: megatron
steps: 4
parameters:
  training.global_batch: {grid: [32, 64, lots]}
  policy: {grid: [none, depth]}
  cluster.links[west-east].latency: {uniform: [1 ms, 50 ms]}
draws: 30
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sweep")
    (place / "links.yaml").write_text(SWEEP)
    done = ropebridge("sweep", place / "links.yaml", "-o", place / "links")
    assert done.returncode == 0, done.stderr
    return place / "links"


@pytest.fixture(scope="module")
def points(folder: Path) -> SweptPoints:
    return read_swept_points(folder)


def by_name(points: SweptPoints, name: str) -> SweptMetric:
    return next(metric for metric in points.metrics if metric.name == name)


def test_the_points_of_a_real_sweep_are_read(points: SweptPoints) -> None:
    assert points.name == "links"
    assert len(points.numbers) == 120
    assert len(points.failures) == 60
    assert "lots" in points.failures[0][1]
    batch, policy, latency = points.parameters
    assert (batch.labels, policy.labels) == (("32", "64"), ("none", "depth"))
    # A drawn parameter has as many values as points: it is shown in pieces, in SI units.
    assert (latency.name, len(latency.labels)) == ("cluster.links[west-east].latency_s", 10)
    assert all(text.endswith("ms") for text in latency.texts)
    assert points.metrics[0].name == "samples_per_s"
    # What is the same everywhere, and what is of single devices, is nothing to draw.
    assert not {"steps_done", "cost_usd", "utilisation[west-gpu]"} & {metric.name for metric in points.metrics}


def test_a_cell_is_the_median_of_its_points(folder: Path, points: SweptPoints) -> None:
    batch, policy, latency = points.parameters
    table = pd.read_parquet(folder / "points.parquet")
    table = table[table.status == "ok"]
    grid = heat(points, policy, batch, by_name(points, "step_s"))
    for row, column in product(range(2), range(2)):
        own = table[(table["training.global_batch"] == batch.labels[row]) & (table.policy == policy.labels[column])]
        assert grid[row, column] == pytest.approx(own.step_s.median())
    pieces = heat(points, latency, None, by_name(points, "step_s"))
    assert pieces.shape == (1, 10)
    edges_s = np.linspace(
        *(table["cluster.links[west-east].latency_s"].agg(each) for each in ("min", "max")),  # type: ignore[arg-type]
        11,
    )
    first = table[table["cluster.links[west-east].latency_s"] < edges_s[1]]
    assert pieces[0, 0] == pytest.approx(first.step_s.median())


def swept(values: list[float], more_is_better: bool) -> SweptMetric:
    return SweptMetric("metric", "metric", np.array(values, np.float64), more_is_better)


VALUES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25)


@given(VALUES, st.booleans(), st.booleans())
def test_the_front_is_what_nothing_dominates(values: list[tuple[int, int]], more: bool, other_more: bool) -> None:
    first, second = swept([a for a, _ in values], more), swept([b for _, b in values], other_more)
    worth = [(a if more else -a, b if other_more else -b) for a, b in values]
    wanted = [
        point for point, (a, b) in enumerate(worth) if not any(c >= a and d >= b and (c > a or d > b) for c, d in worth)
    ]
    assert sorted(pareto_front(first, second)) == wanted


def test_points_without_a_value_are_on_no_front() -> None:
    assert pareto_front(swept([1, np.nan, 2], True), swept([1, 9, np.nan], True)) == [0]


def test_the_command_draws_a_sweep(folder: Path, tmp_path: Path) -> None:
    targets = [tmp_path / f"links{suffix}" for suffix in (".html", ".png", ".svg")]
    done = ropebridge("report", folder, *(word for target in targets for word in ("-o", target)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(target) for target in targets]
    assert (tmp_path / "links.png").stat().st_size > 20_000
    assert "<svg" in (tmp_path / "links.svg").read_text()


def test_what_a_sweep_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((folder, "-o", tmp_path / "links.json"), "a sweep has no events"),
        ((folder, folder), "a sweep is reported by itself"),
        ((folder, "-o", tmp_path / "links.pdf"), "let its name end in .html"),
    ):
        done = ropebridge("report", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("damage", ["sweep.json", "points.parquet"])
def test_a_damaged_sweep_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    for name in ("sweep.json", "points.parquet"):
        (tmp_path / name).write_bytes((folder / name).read_bytes() if name != damage else b"{}")
    with pytest.raises(InputError, match="the sweep is damaged"):
        read_swept_points(tmp_path)


def test_a_sweep_without_a_point_that_went_well_is_refused(folder: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(folder / "points.parquet")
    table[table.status == "failed"].to_parquet(tmp_path / "points.parquet")
    (tmp_path / "sweep.json").write_bytes((folder / "sweep.json").read_bytes())
    with pytest.raises(InputError, match="nothing to draw"):
        read_swept_points(tmp_path)


def test_a_sweep_of_one_parameter_has_a_map_of_one_row(folder: Path, tmp_path: Path) -> None:
    described = json.loads((folder / "sweep.json").read_text())
    described["parameters"] = described["parameters"][1:2]
    (tmp_path / "sweep.json").write_text(json.dumps(described))
    (tmp_path / "points.parquet").write_bytes((folder / "points.parquet").read_bytes())
    done = ropebridge("report", tmp_path, "-o", tmp_path / "one.html", "-o", tmp_path / "one.png")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def driver() -> Iterator["WebDriver"]:
    with browser() as started:
        yield started


@pytest.fixture
def page(driver: "WebDriver", points: SweptPoints, tmp_path: Path) -> "WebDriver":
    write_sweep_page(points, tmp_path / "page.html")
    complaints(driver)
    open_page(driver, tmp_path / "page.html")
    return driver


def ask(page: "WebDriver", script: str, *arguments: object) -> Any:
    return page.execute_script(script, *arguments)


def choose(page: "WebDriver", select: str, label: str) -> None:
    ask(
        page,
        "const select = document.getElementById(arguments[0]);"
        "select.value = [...select.options].find((option) => option.text === arguments[1]).value;"
        "select.dispatchEvent(new Event('change'))",
        select,
        label,
    )


def columns(page: "WebDriver", source: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = ask(page, "return Bokeh.documents[0].get_model_by_name(arguments[0]).data", source)
    return found


@needs_browser
def test_the_page_opens_without_a_complaint(page: "WebDriver") -> None:
    assert complaints(page) == []
    assert ask(page, "return [...document.querySelectorAll('section')].map((each) => each.id)") == [
        "heat",
        "front",
        "failed",
    ]


@needs_browser
def test_the_map_follows_what_is_chosen(page: "WebDriver", points: SweptPoints) -> None:
    batch, policy, _ = points.parameters
    metric = by_name(points, "step_s")
    choose(page, "heat-x", policy.name)
    choose(page, "heat-y", batch.name)
    choose(page, "heat-metric", metric.label)
    cells = columns(page, "heat-cells")
    grid = heat(points, policy, batch, metric)
    assert len(cells["x"]) == grid.size
    for x, y, value in zip(cells["x"], cells["y"], cells["value"], strict=True):
        assert value == pytest.approx(grid[batch.labels.index(y), policy.labels.index(x)])
    assert columns(page, "heat-best")["value"] == pytest.approx([grid.min()])
    assert sum(cells["points"]) == len(points.numbers)
    choose(page, "heat-x", "nothing")
    choose(page, "kept-1", "depth")
    kept = columns(page, "heat-cells")
    assert kept["value"] == pytest.approx([grid[batch.labels.index(y), 1] for y in kept["y"]])
    assert complaints(page) == []


@needs_browser
@pytest.mark.parametrize(("first", "second"), [("bubble_ratio", "samples_per_s"), ("wan_bytes", "step_s")])
def test_the_front_follows_what_is_chosen(page: "WebDriver", points: SweptPoints, first: str, second: str) -> None:
    across, up = by_name(points, first), by_name(points, second)
    choose(page, "front-x", across.label)
    choose(page, "front-y", up.label)
    front = pareto_front(across, up)
    line = columns(page, "front-line")
    assert line["x"] == pytest.approx(across.values[front].tolist())
    assert line["y"] == pytest.approx(up.values[front].tolist())
    rows = ask(page, "return [...document.querySelectorAll('#best tbody tr')].map((row) => row.cells[0].textContent)")
    assert [int(row) for row in rows] == [points.numbers[point] for point in front][:200]
    assert len(columns(page, "front-points")["x"]) == len(points.numbers)
