"""How soon the page of a large run is there, in a real browser."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from experiments.benches.browser import browser, complaints, open_page
from experiments.benches.cases import wide_area_scenario
from experiments.benches.result import BenchResult, Check, Row
from experiments.report.html.run_page import write_run_page
from planner.runs.record import RunRecord
from planner.systems.registry import make_plan
from sim.simulator import Simulator

# Devices, steps, samples a step: eight and thirty-two microbatches a pipeline.
CASES = ((64, 100, 16), (64, 100, 64))
REGIONS = 4
OPENINGS, QUICK_OPENINGS = 5, 2

MOST_S = 3
LEAST_BARS = 100_000
MOST_MB = 10


def measure_report(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Simulate, write the page, open it some times, look at another part of the run."""
    openings = QUICK_OPENINGS if quick else OPENINGS
    cases = CASES[:1] if quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        rows = [_measure(*case, Path(folder) / "report.html", openings, tell) for case in cases]
    first = rows[0]
    case = str(first["case"])
    return BenchResult(
        rows,
        [
            Check(f"{case}: bars in the page", float(first["bars"]), LEAST_BARS, False),
            Check(f"{case}: seconds until all is drawn", float(first["drawn_s"]), MOST_S, True),
            Check(f"{case}: seconds to draw the whole run", float(first["whole_run_s"]), MOST_S, True),
            Check(f"{case}: size of the page in MB", float(first["page_mb"]), MOST_MB, True),
            Check("complaints of the browser", float(sum(int(row["complaints"]) for row in rows)), 0, True),
        ],
    )


def _measure(
    devices: int, steps: int, global_batch: int, page: Path, openings: int, tell: Callable[[str], None]
) -> Row:
    tell(f"{devices} devices, {steps} steps of {global_batch} samples")
    record = _simulated(devices, steps, global_batch)
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


def _simulated(devices: int, steps: int, global_batch: int) -> RunRecord:
    scenario = wide_area_scenario(devices=devices, regions=REGIONS, global_batch=global_batch)
    return Simulator().run(scenario, make_plan("megatron", scenario), None, steps)


_SHOW_EVERYTHING = """
const answer = arguments[0], start = performance.now();
document.querySelector('button[data-does="everything"]').click();
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => answer(performance.now() - start))));
"""
