"""``ropebridge bench``: measurements of ropebridge itself, held against its bars."""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from experiments.benches.adaptation import measure_adaptation
from experiments.benches.fidelity import measure_fidelity
from experiments.benches.result import BenchResult
from traces.naming import find_by_name

Bench = Callable[[bool, Callable[[str], None]], BenchResult]

BENCHES: Mapping[str, Bench] = {"fidelity": measure_fidelity, "adaptation": measure_adaptation}


def bench(name: str, quick: bool, as_json: bool, tell: Callable[[str], None]) -> tuple[str, bool]:
    """Run a bench; return what to print and whether every check holds.

    Args:
        name: One of `BENCHES`.
        quick: Fewer cases and steps.
        as_json: Whether to print JSON.
        tell: Takes a line about the progress.
    """
    result = find_by_name(name, BENCHES, "bench")(quick, tell)
    holds = all(check.holds for check in result.checks)
    if not as_json:
        return result.text(), holds
    checks = [{**asdict(check), "holds": check.holds} for check in result.checks]
    return json.dumps({"rows": list(result.rows), "checks": checks, "machine": _machine()}), holds


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
