"""Measures how long a browser takes to show the page of a large run."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from experiments.benches.cases import wide_area_scenario
from experiments.benches.result import BenchResult, Row, at_least, at_most
from experiments.report.html.run_page import write_run_page
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver


_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_DRIVER = "chromedriver"

# JavaScript that waits until the page sets `data-ready`, which means that all is drawn; returns the milliseconds since
# the page was opened.
_WHEN_READY = """
const answer = arguments[0];
(function look() {
  if (document.documentElement.dataset.ready) requestAnimationFrame(() => setTimeout(() => answer(performance.now())));
  else setTimeout(look, 5);
})();
"""
_TIMEOUT_S = 60


def missing() -> str:
    """Return the first program or package that `browser` needs and does not find; empty if nothing is missing."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium, pip install 'ropebridge[dev]'"
    if not any(map(shutil.which, _CHROMIUM)):
        return "Chromium (Debian: apt install chromium)"
    return "" if shutil.which(_DRIVER) else "chromedriver (Debian: apt install chromium-driver)"


@contextmanager
def browser(width_pixels: int = 1400, height_pixels: int = 1000) -> Iterator["WebDriver"]:
    """Open a browser without a visible window, as a context manager that closes it; sizes are those of the page.

    Raises:
        InputError: Selenium, Chromium or chromedriver is missing.
    """
    lacking = missing()
    if lacking:
        raise InputError(f"a browser cannot be started: there is no {lacking}", valid="install it")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(next(filter(None, map(shutil.which, _CHROMIUM))))
    # Chromium's sandbox does not work in containers; the browser only opens pages that ropebridge wrote.
    arguments = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")
    for argument in (*arguments, f"--window-size={width_pixels},{height_pixels}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which(_DRIVER)))
    try:
        driver.set_script_timeout(_TIMEOUT_S)
        yield driver
    finally:
        driver.quit()


def open_page(driver: "WebDriver", page: Path) -> float:
    """Open a page that ``ropebridge report`` wrote; return the seconds until everything in it was drawn."""
    driver.get(page.resolve().as_uri())
    return float(driver.execute_async_script(_WHEN_READY)) / 1000


def complaints(driver: "WebDriver") -> list[str]:
    """Return the errors and warnings that the page has logged since the last call."""
    entries = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [str(entry["message"]) for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


# Numbers of devices, of steps, and of samples in a step; they give 8 and 32 microbatches in a pipeline.
CASES = ((64, 100, 16), (64, 100, 64))
REGIONS = 4
OPENINGS, QUICK_OPENINGS = 5, 2

MOST_S = 3
LEAST_BARS = 100_000
MOST_MB = 10


def measure_report(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Simulate runs and write their pages; measure how long a browser takes to open a page and to show a whole run."""
    openings = QUICK_OPENINGS if quick else OPENINGS
    cases = CASES[:1] if quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        rows = [_measure(*case, Path(folder) / "report.html", openings, tell) for case in cases]
    first = rows[0]
    case = str(first["case"])
    return BenchResult(
        rows,
        [
            at_least(f"{case}: bars in the page", float(first["bars"]), LEAST_BARS),
            at_most(f"{case}: seconds until all is drawn", float(first["drawn_s"]), MOST_S),
            at_most(f"{case}: seconds to draw the whole run", float(first["whole_run_s"]), MOST_S),
            at_most(f"{case}: size of the page in MB", float(first["page_mb"]), MOST_MB),
            at_most("complaints of the browser", float(sum(int(row["complaints"]) for row in rows)), 0),
        ],
    )


def _measure(
    devices: int, steps: int, global_batch: int, page: Path, openings: int, tell: Callable[[str], None]
) -> Row:
    tell(f"{devices} devices, {steps} steps of {global_batch} samples")
    scenario = wide_area_scenario(devices=devices, regions=REGIONS, global_batch=global_batch)
    record = Simulator().run(scenario, make_plan("megatron", scenario), None, steps)
    start = perf_counter()
    write_run_page([record], ["simulated"], page)
    written_s = perf_counter() - start
    with browser() as driver:
        drawn_s = [open_page(driver, page) for _ in range(openings)]
        whole_run_s = float(driver.execute_async_script(_SHOW_EVERYTHING)) / 1000
        complained = len(complaints(driver))
    return {
        "case": f"{devices} devices x {steps} steps",
        "microbatches": len(record.plan.pipelines[0].microbatches),
        "bars": len(record.events),
        "page_mb": page.stat().st_size / 1e6,
        "write_s": written_s,
        "drawn_s": median(drawn_s),
        "slowest_s": max(drawn_s),
        "whole_run_s": whole_run_s,
        "complaints": complained,
    }


_SHOW_EVERYTHING = """
const answer = arguments[0], start = performance.now();
document.querySelector('button[data-does="everything"]').click();
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => answer(performance.now() - start))));
"""
