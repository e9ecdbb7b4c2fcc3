"""Fidelity cases made by hand: schedules, replicas, gradient sums, asynchronous updates, traces, the hosts' own TCP."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from experiments.benches.cases import TRACES_VARIABLE, played
from experiments.benches.fidelity.case import STEPS_ON_TRACES, Case
from experiments.benches.fidelity.stages import Regions, Stages, on_links, pipeline_case, regions_case
from planner.plan.plan import Synchronisation
from traces.formats import read_trace
from traces.generators.presets import preset
from traces.trace import LinkTrace

BROADBAND = "fcc_mba_2016/traces"

TWO = Stages([0.02, 0.02], [(400e6, 0.05)], output_bytes=1_000_000)
WINDOW = replace(TWO, output_bytes=3_000_000)
FOUR = Stages([0.006, 0.015, 0.009, 0.0125], [(150e6, 0.03), (80e6, 0.012), (300e6, 0.045)])
EIGHT = Stages([0.01, 0.015, 0.0075, 0.01] * 2, [(200e6, 0.01)] * 7, output_bytes=200_000)
# Two pipelines whose activations and gradients share every link between regions.
SHARED = Stages([0.015, 0.02], [(120e6, 0.02)], output_bytes=300_000, pipelines=2)
THREE_SHARED = Stages([0.02, 0.01, 0.02], [(150e6, 0.02), (100e6, 0.01)], output_bytes=200_000, pipelines=2)

# Four devices in two regions, whose gradients cross the link between the regions.
DATA_PARALLEL = Regions((2, 2), (4, 3, 3, 2), 0.05, 100e6)
# Three unlike regions, whose updates keep the links as busy as the devices: updates arrive steps late.
ASYNCHRONOUS = Regions((1, 1, 1), (4, 3, 2), 0.03, 80e6, parameter_bytes=2_000_000)
ASYNCHRONOUS_SLOW = replace(ASYNCHRONOUS, rate=40e6, parameter_bytes=4_000_000)


def hand_made_cases(tell: Callable[[str], None]) -> list[Case]:
    """Return the cases; leave out those on recorded traces if there is no folder of them, and report this."""
    made = [*_steady(), *_replicas(), *_regions(), *_shared(), *_swaying(), *_recorded(tell)]
    by_name = {case.name: case for case in made}
    as_is = [by_name[name] for name in AS_IS if name in by_name]
    return [*made, *(replace(case, name=f"{case.name}-as-is", tcp="as-is") for case in as_is)]


# Cases that also run with TCP as this machine has it.
AS_IS = (
    "two-1f1b",
    "window-one-connection",
    "four-unlike-1f1b",
    "eight-compact-zb",
    "data-parallel-ring",
    "three-regions-asgd",
    "shared-lte-1f1b",
    "three-5g-dynamic",
    "recorded-2-1f1b",
)


def _steady() -> Iterator[Case]:
    yield pipeline_case("two", "1f1b", TWO, (1,) * 8, [4, 2], "1f1b")
    yield pipeline_case("two", "compact-zb", TWO, (1,) * 8, [8, 8], "compact-zb")
    yield pipeline_case("two", "dynamic", TWO, (1,) * 8, [6, 6], "compact-zb", order="dynamic")
    yield pipeline_case("two", "gpipe", TWO, (1,) * 8, [8, 8], "gpipe")
    yield pipeline_case("window", "one-connection", WINDOW, (1,) * 8, [8, 8], "1f1b")
    yield pipeline_case("window", "four-connections", WINDOW, (1,) * 8, [8, 8], "1f1b", connections=4)
    # With a loss of one packet in a thousand, TCP reaches a tenth of the link's rate.
    torn = Stages([0.02, 0.02], [(100e6, 0.02)], output_bytes=200_000)
    yield on_links(pipeline_case("two-loss", "1f1b", torn, (1,) * 8, [6, 4], "1f1b", steps=STEPS_ON_TRACES), loss=0.001)
    narrow = Stages([0.02, 0.025], [(60e6, 0.02)], output_bytes=600_000)
    yield pipeline_case("narrow", "int8", narrow, (1,) * 8, [6, 4], "1f1b", compression="int8")
    for schedule, depths in (
        ("gpipe", [6] * 4),
        ("1f1b", [4, 3, 2, 1]),
        ("zb-h1", [4, 3, 2, 1]),
        ("compact-zb", [6, 6, 4, 3]),
    ):
        yield pipeline_case("four-unlike", schedule, FOUR, (1,) * 10, depths, schedule)
    yield pipeline_case("four-uneven", "1f1b", FOUR, (3, 1, 2, 2, 1, 3), [4, 3, 2, 1], "1f1b")
    uneasy = Stages([0.02, 0.03, 0.025], [(100e6, 0.02), (100e6, 0.02)])
    yield on_links(pipeline_case("three-jitter", "1f1b", uneasy, (1,) * 8, [6, 4, 2], "1f1b"), jitter_s=0.004)
    yield pipeline_case("eight", "compact-zb", EIGHT, (1,) * 12, [10, 8, 8, 6, 6, 4, 4, 2], "compact-zb")


def _replicas() -> Iterator[Case]:
    one_more = Stages([0.01, 0.02], [(200e6, 0.02)], [[2.0, 1.0], [1.0]])
    yield pipeline_case("two-replicas-and-one", "1f1b", one_more, (6,) * 3, [3, 1], "1f1b")
    wide = Stages([0.01, 0.012], [(200e6, 0.02)], [[2.0, 1.0, 1.0], [1.0, 1.0]])
    yield pipeline_case("three-replicas-and-two", "zb-h1", wide, (8,) * 4, [2, 1], "zb-h1")


def _regions() -> Iterator[Case]:
    for algorithm in ("ring", "hierarchical", "tree"):
        yield regions_case("data-parallel", algorithm, DATA_PARALLEL, Synchronisation(algorithm=algorithm))
    layered = replace(DATA_PARALLEL, layers=3)
    yield regions_case("data-parallel-buckets", "ring", layered, Synchronisation(bucket_bytes=1))
    yield regions_case("three-regions", "asgd", ASYNCHRONOUS, Synchronisation("asgd", staleness_bound=3))
    averaging = Synchronisation("ma", interval_steps=3, staleness_bound=3)
    yield regions_case("three-regions", "ma", ASYNCHRONOUS, averaging)
    accumulating = Synchronisation("asgd-ga", interval_steps=2, staleness_bound=2)
    yield regions_case("slow-regions", "asgd-ga", ASYNCHRONOUS_SLOW, accumulating)


def _shared() -> Iterator[Case]:
    yield pipeline_case("shared", "1f1b", SHARED, (1,) * 6, [5, 3], "1f1b")
    yield pipeline_case("shared", "zb-h1", SHARED, (1,) * 6, [5, 3], "zb-h1")
    yield pipeline_case("three-shared", "compact-zb", THREE_SHARED, (1,) * 6, [6, 4, 2], "compact-zb")
    for name, mean_bps, seed in (("lte", 100e6, 3), ("5g", 150e6, 8), ("satellite", 150e6, 2)):
        stages = replace(SHARED, links=[(_played(name, mean_bps, seed), 0.02)])
        yield pipeline_case(f"shared-{name}", "1f1b", stages, (1,) * 6, [6, 4], "1f1b", steps=STEPS_ON_TRACES)


def _swaying() -> Iterator[Case]:
    for name, mean_bps in (("lte", 60e6), ("5g", 120e6)):
        stages = Stages([0.02, 0.015, 0.02], [(_played(name, mean_bps, 5), 0.02), (200e6, 0.01)], output_bytes=400_000)
        yield pipeline_case(f"three-{name}", "1f1b", stages, (1,) * 8, [8, 6, 3], "1f1b", steps=STEPS_ON_TRACES)
        yield pipeline_case(
            f"three-{name}", "dynamic", stages, (1,) * 8, [8, 6, 3], "zb-h1", order="dynamic", steps=STEPS_ON_TRACES
        )


def _played(name: str, mean_bps: float, seed: int) -> LinkTrace:
    return played(preset(name, duration_s=60.0, seed=seed), mean_bps)


def _recorded(tell: Callable[[str], None]) -> Iterator[Case]:
    folder = Path(os.environ.get(TRACES_VARIABLE, "")) / BROADBAND
    if TRACES_VARIABLE not in os.environ or not folder.is_dir():
        tell(f"cases recorded-* are skipped: {BROADBAND} is in no folder that {TRACES_VARIABLE} names")
        return
    # Fixed broadband of about 1 Mbit/s, a rate every 5 s: played ten times as fast, scaled to a mean of 80 Mbit/s.
    found = [played(read_trace(path), 80e6, speed=10) for path in sorted(folder.iterdir())[5:45:5]]
    for number, (one, other) in enumerate(zip(found[::2], found[1::2], strict=True)):
        stages = Stages([0.02, 0.02, 0.02], [(one, 0.03), (other, 0.01 * (number + 1))], output_bytes=400_000)
        yield pipeline_case(f"recorded-{number}", "1f1b", stages, (1,) * 6, [6, 4, 2], "1f1b", steps=STEPS_ON_TRACES)
    for number, trace in enumerate(found[1:4:2]):
        stages = replace(SHARED, links=[(trace, 0.025)], output_bytes=200_000)
        yield pipeline_case(
            f"shared-recorded-{number}", "zb-h1", stages, (1,) * 6, [6, 4], "zb-h1", steps=STEPS_ON_TRACES
        )
