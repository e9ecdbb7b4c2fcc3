"""Reads the ``trace`` of a link in a scenario: a file, a preset, or steps written in place."""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from planner.files.documents import Document, Location
from planner.files.parsing import BitsPerSecond, Seconds, file_entry
from traces.common.errors import InputError
from traces.formats import read_trace
from traces.generators.presets import preset
from traces.trace import LinkTrace

# Duration of a preset's trace if the scenario gives none.
PRESET_DURATION_S = 600.0


@file_entry
class TraceStep:
    """The rate of a link from the time ``at`` on."""

    at: Seconds
    bandwidth: BitsPerSecond


@file_entry
class TraceEntry:
    """A trace from one of ``file``, ``preset`` and ``steps``, and how it is used.

    Attributes:
        file: Path relative to the scenario, in any format that `traces.formats` detects.
        preset: Name of a generator from `traces.generators.presets`.
        steps: Times and rates; the first at 0 s.
        mean: Mean rate after rescaling; rates are unchanged if absent.
        duration: Duration of a preset or of steps.
        seed: Seed of a preset.
        after: What follows the end of the trace: ``loop`` repeats it, ``hold`` keeps its last rate, and with ``end`` a
            run that is longer than the trace is refused.
    """

    file: str | None = None
    preset: str | None = None
    steps: tuple[TraceStep, ...] | None = None
    mean: BitsPerSecond | None = None
    duration: Seconds | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    after: Literal["loop", "hold", "end"] = "loop"


def read_trace_entry(entry: TraceEntry, document: Document, location: Location) -> LinkTrace:
    """Return the trace of an entry; ``location`` is the entry's place in the document, for messages."""
    where = document.where(location)
    given = [name for name in ("file", "preset", "steps") if getattr(entry, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InputError(f"the trace gives {found}", where=where, valid="give one of 'file', 'preset' and 'steps'")
    loops = entry.after == "loop"
    try:
        if entry.file is not None:
            if entry.duration is not None:
                raise InputError("'duration' is not allowed with 'file', which has its own", valid="remove 'duration'")
            trace = read_trace(document.path.parent / entry.file, loops=loops)
        else:
            trace = _from_preset(entry, loops) if entry.preset is not None else _from_steps(entry, loops)
    except InputError as error:
        raise error.within(where) from None
    if entry.after == "end":
        trace = replace(trace, ends=True)
    if entry.mean is None:
        return trace
    if trace.mean_bps == 0:
        raise InputError("a trace whose rate is always 0 cannot be rescaled", where=where, valid="remove 'mean'")
    return replace(trace, bandwidth_bps=trace.bandwidth_bps * (entry.mean / trace.mean_bps))


def _from_preset(entry: TraceEntry, loops: bool) -> LinkTrace:
    assert entry.preset is not None
    duration_s = PRESET_DURATION_S if entry.duration is None else entry.duration
    made = _preset(entry.preset, duration_s, entry.seed)
    return LinkTrace(made.times_s, made.bandwidth_bps, made.duration_s, made.latency_s, loops)


@lru_cache(maxsize=64)
def _preset(name: str, duration_s: float, seed: int) -> LinkTrace:
    """Return a preset, cached because the scenarios of a sweep often share their presets."""
    return preset(name, duration_s=duration_s, seed=seed)


def _from_steps(entry: TraceEntry, loops: bool) -> LinkTrace:
    assert entry.steps is not None
    times_s = [step.at for step in entry.steps]
    if entry.duration is None and entry.after != "hold":
        raise InputError(f"steps with 'after: {entry.after}' need a duration", valid="add 'duration', or 'after: hold'")
    duration_s = entry.duration if entry.duration is not None else (times_s[-1] if times_s else 0.0) + 1.0
    rates = np.array([step.bandwidth for step in entry.steps])
    return LinkTrace(np.array(times_s), rates, duration_s, None, loops)
