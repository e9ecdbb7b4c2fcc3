"""The verb ``ropebridge profile kind``: measures this device's rates and writes them as the table of its kind."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from executor.profiling.kind_rates import KindRates, measure_kind, measuring_steps
from executor.training.device import cpu_name, threads_of_a_rank
from experiments.profiles.model import in_words, measured_device
from experiments.profiles.model_config import KindConfig
from experiments.runs.progress import showing_rounds
from planner.files.cluster import read_kind_table
from planner.scenario.kind_table import KindTable
from traces.common.atomic import write_text_atomically

# Significant digits in the file; further digits differ from run to run.
_DIGITS = 4


def profile_kind(config: KindConfig, output: Path, *, as_json: bool, tell: Callable[[str], None]) -> str:
    """Measure this device, write the table of its kind, and return the table as text, or as JSON in SI units.

    ``config`` has been checked by `check_kind_config`.

    Raises:
        InputError: There is no GPU, or the device is not of the kind.
    """
    device, kind = measured_device(config.device, config.kind)
    threads = config.threads or threads_of_a_rank(1)
    torch.set_num_threads(threads)
    with showing_rounds(measuring_steps(), tell) as begin:
        rates = measure_kind(config.precision, device, config.limit_s, begin)
    name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    source = f"ropebridge profile kind: {in_words(device, threads)}"
    text = _document(rates, {"kind": kind, "device": name, "precision": config.precision, "source": source})
    write_text_atomically(output, json.dumps(text) + "\n" if output.suffix == ".json" else _yaml(text))
    table = read_kind_table(output)
    if as_json:
        return json.dumps({"file": str(output), **asdict(table)}, indent=2)
    return "\n".join([*_lines(table), f"written to {output}: name it in 'roofline:' of a model"])


def _document(rates: KindRates, head: dict[str, str]) -> dict[str, Any]:
    return {
        **head,
        "launch": f"{1e6 * rates.launch_s:.{_DIGITS}g} us",
        "memory_bandwidth": f"{rates.memory_bandwidth_bytes_per_s / 1e9:.{_DIGITS}g} GB/s",
        "rows": list(rates.grid.rows),
        "inner": list(rates.grid.widths),
        "outer": list(rates.grid.widths),
        "rates": [[[f"{rate / 1e9:.{_DIGITS}g} GFLOP/s" for rate in row] for row in matrix] for matrix in rates.rates],
    }


def _yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)


def _lines(table: KindTable) -> list[str]:
    """Return the rates of products with equal widths, and the other measured values, as lines of text."""
    widths = [each for each in table.inner if each in table.outer]
    lines = [
        f"{table.kind} in {table.precision} ({table.source})",
        f"launch of a kernel: {1e6 * table.launch_s:.3g} us; memory: "
        f"{table.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s read and written by a copy",
        "GFLOP/s of rows x width with width x width",
        f"{'rows':>8}" + "".join(f"{width:>10}" for width in widths),
    ]
    return [
        *lines,
        *(
            f"{rows:>8}" + "".join(f"{table.rate(rows, width, width) / 1e9:>10.4g}" for width in widths)
            for rows in table.rows
        ),
    ]
