"""The bench ``exchanges``: simulated and real throughput of workers in regions that exchange pseudo-gradients."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from executor.backend import choose_emulator
from experiments.benches.cases import played
from experiments.benches.fidelity.case import Case
from experiments.benches.fidelity.compare import Outcome, compare
from experiments.benches.fidelity.kept import KeptRuns
from experiments.benches.fidelity.stages import Regions, Stages, pipeline_case, regions_case, with_syncer
from experiments.benches.result import BenchResult, at_most
from planner.plan.outer_step import ALLGATHER, OuterStep
from planner.plan.plan import Pipeline, Replica, Stage, Synchronisation
from traces.generators.presets import preset

RUNS = 3
STEPS = 24
MOST_ERROR = 0.05

# Three unlike regions. The whole model takes about as long over a link as four steps of the slowest worker.
THREE = Regions((1, 1, 1), (4, 3, 2), 0.03, 40e6, parameter_bytes=8_000_000, layers=4)
# Two workers in each of two regions share the links between these.
FOUR = Regions((2, 2), (3, 3, 2, 2), 0.03, 50e6, parameter_bytes=4_000_000, layers=4)
# Two workers of two stages each, whose activations and pseudo-gradients share the links between the regions.
STAGES = Stages([0.015, 0.02], [(120e6, 0.02)], layers=2, output_bytes=300_000, parameter_bytes=4_000_000, pipelines=2)

_STREAMS = OuterStep(fragments=2, pattern="strided", overlap_steps=2, mixing=0.5)
_SPARSE = OuterStep(learning_rate=1.0, momentum=0.0, compression="int4", density=0.02, feedback=0.95)


def outer_step_cases() -> Iterator[Case]:
    """Yield the cases: every method and both exchanges, with links of their own, shared ones and changing ones.

    The last ones send updates without waiting for them, which fills links in both directions.
    """
    streaming = Synchronisation("diloco-streaming", interval_steps=4, outer=_STREAMS)
    changing = replace(THREE, rate=played(preset("lte", duration_s=60.0, seed=4), 40e6))
    for exchange, suffix in ((None, ""), (ALLGATHER, "-allgather")):
        outer = replace(_STREAMS, exchange=exchange)
        whole = Synchronisation("diloco", interval_steps=4, outer=OuterStep(exchange=exchange))
        streams = replace(streaming, outer=outer)
        packed = replace(streaming, outer=replace(outer, compression="int8"))
        yield regions_case("three-workers", f"diloco{suffix}", THREE, whole, steps=STEPS)
        yield regions_case("three-workers", f"streaming{suffix}", THREE, streams, steps=STEPS)
        yield regions_case("three-workers-lte", f"streaming{suffix}", changing, streams, steps=STEPS)
        yield regions_case("three-workers-lte", f"streaming-int8{suffix}", changing, packed, steps=STEPS)
        yield regions_case("four-workers", f"diloco{suffix}", FOUR, replace(whole, interval_steps=6), steps=STEPS)
        yield regions_case("four-workers", f"streaming{suffix}", FOUR, streams, steps=STEPS)
    sparse = Synchronisation("diloco", interval_steps=3, outer=_SPARSE)
    yield regions_case("three-workers", "sparse", THREE, sparse, steps=STEPS)
    yield pipeline_case(
        "two-workers", "streaming", STAGES, (1,) * 4, [4, 2], "1f1b", steps=STEPS, synchronisation=streaming
    )
    yield _workers_of_stages("two-regions", streaming)
    for name, quorum in (("any", 1), ("two", 2)):
        outer = replace(_STREAMS, quorum=quorum, grace_s=0.1)
        decoupled = Synchronisation("diloco-decoupled", interval_steps=4, outer=outer)
        yield with_syncer(regions_case("three-workers", f"decoupled-{name}", THREE, decoupled, steps=STEPS))
    for size_mb, latency_ms, rate_mbps in ((2, 80, 20), (5, 80, 20), (5, 20, 50), (10, 40, 50), (20, 40, 100)):
        two = Regions(
            (1, 1), (2, 2), 0.03, rate_mbps * 1e6, latency_ms / 1e3, parameter_bytes=size_mb * 10**6, layers=4
        )
        name = f"two-workers-{size_mb}MB-{latency_ms}ms-{rate_mbps}Mbps"
        yield regions_case(name, "asgd", two, Synchronisation("asgd", staleness_bound=1), steps=STEPS)
        rarely = Synchronisation("asgd-ga", interval_steps=4, staleness_bound=4)
        yield regions_case(name, "asgd-ga", two, rarely, steps=STEPS)


def _workers_of_stages(name: str, how: Synchronisation) -> Case:
    """Return a case of a worker in each of two regions, of two stages, which exchange over the same link."""
    made = regions_case(name, how.method, replace(FOUR, samples=(3, 0, 3, 0), rate=20e6), how, steps=STEPS)
    middle, names = FOUR.layers // 2, [device.name for device in made.scenario.cluster.devices]
    pipelines = tuple(
        Pipeline((Stage(0, middle, (Replica(first),), 2), Stage(middle, FOUR.layers, (Replica(second),), 1)), (1, 1, 1))
        for first, second in (names[:2], names[2:])
    )
    return replace(made, plan=replace(made.plan, pipelines=pipelines))


def measure_outer_steps(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Run every case in both backends, with paced compute over emulated links, and compare throughputs and bytes."""
    emulator = choose_emulator("relay", tell)
    outcomes: list[Outcome] = []
    kept = KeptRuns(None)
    for case in list(outer_step_cases())[:: 3 if quick else 1]:
        outcomes.append(compare(case, 1 if quick else RUNS, emulator, tell, kept))
        tell(f"{case.name}: {100 * outcomes[-1].throughput_error:+.1f} % in throughput")
    waiting = [each for each in outcomes if each.case.plan.synchronisation.has_common_outer_step]
    updates = [each for each in outcomes if not each.case.plan.synchronisation.has_outer_step]
    checks = [
        at_most(f"worst throughput error {of_what}", max(abs(each.throughput_error) for each in some), MOST_ERROR)
        for of_what, some in (
            ("of outer steps", [each for each in outcomes if each not in updates]),
            ("of updates that fill links in both directions", updates),
        )
        if some
    ]
    checks += [
        at_most(
            "largest WAN byte difference where workers wait for all", max(each.byte_difference for each in waiting), 0
        ),
    ]
    return BenchResult([each.row() for each in outcomes], checks)
