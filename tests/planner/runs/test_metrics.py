import pytest

from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.event_totals import step_ends_s, wan_bytes
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training

NEAR, FAR = "near", "far"


def cluster() -> Cluster:
    """Two devices in one region, one in another; each ordered pair of regions has a link with a price."""
    devices = (
        Device("a", "kind", NEAR, 1, price_per_hour=36.0),
        Device("b", "kind", NEAR, 1, price_per_hour=72.0),
        Device("c", "kind", FAR, 1),
    )
    links = (
        Link(NEAR, NEAR, 1e9, 0.0),
        Link(NEAR, FAR, 1e9, 0.0, price_per_gb=0.5),
        Link(FAR, NEAR, 1e9, 0.0, price_per_gb=0.25),
    )
    return Cluster(devices, links)


def compute(device: str, step: int, start_s: float, end_s: float) -> Event:
    return Event(EventKind.COMPUTE, device, "", 0, 0, 0, step, "F", start_s, end_s, 0)


def send(device: str, peer: str, size_bytes: int, end_s: float = 1.0) -> Event:
    return Event(EventKind.SEND, device, peer, 0, 0, 0, 0, "F", 0.0, end_s, size_bytes)


def sync(device: str, step: int, start_s: float, end_s: float) -> Event:
    return Event(EventKind.SYNC, device, "", 0, 0, -1, step, "S", start_s, end_s, 8)


def record(*events: Event) -> RunRecord:
    """A run of a batch of 6 on all three devices."""
    scenario = Scenario("priced", cluster(), ModelProfile("model", ()), Training(global_batch=6))
    stage = Stage(0, 1, (Replica("a"), Replica("b"), Replica("c")), in_flight=1)
    plan = Plan("priced", "model", "hand", "1f1b", (Pipeline((stage,), (6,)),))
    return RunRecord("simulated", scenario, plan, events, ())


def test_all_metrics_by_hand() -> None:
    metrics = measure(
        record(
            # Step 0 lasts 10 s, step 1 5 s, step 2 3 s; the run 18 s.
            compute("a", 0, 2.0, 8.0),
            compute("b", 0, 3.0, 12.0),
            compute("a", 1, 12.0, 14.0),
            sync("a", 1, 14.0, 17.0),
            compute("c", 2, 17.0, 20.0),
            send("a", "b", 10**9),
            send("a", "c", 4 * 10**9),
            send("c", "b", 2 * 10**9),
        )
    )
    assert metrics.steps == 3
    assert metrics.step_s == 4.0
    assert metrics.samples_per_s == pytest.approx(6 * 2 / 8)
    # Busy 8, 9 and 3 of 18 s; a gradient sum is no compute.
    assert metrics.utilisation == pytest.approx({"a": 8 / 18, "b": 9 / 18, "c": 3 / 18})
    assert metrics.bubble_ratio == pytest.approx(1 - 20 / 54)
    assert metrics.wan_bytes == 6 * 10**9
    # 108 US dollars an hour for 18 s; 4 GB at 0.5 and 2 GB at 0.25.
    assert metrics.cost_usd == pytest.approx(108 * 18 / 3600 + 2.0 + 0.5)


def test_a_run_of_one_step_counts_it() -> None:
    metrics = measure(record(compute("a", 0, 1.0, 4.0)))
    assert (metrics.steps, metrics.step_s, metrics.samples_per_s) == (1, 3.0, 2.0)


def test_the_end_of_a_step_is_that_of_its_last_compute_or_sum() -> None:
    events = [
        compute("a", 1, 5.0, 6.0),
        sync("b", 0, 4.0, 5.5),
        compute("a", 0, 0.0, 4.0),
        send("a", "c", 1, end_s=99.0),
    ]
    assert step_ends_s(events) == [5.5, 6.0]


def test_traffic_inside_a_region_is_no_wan_traffic() -> None:
    received = Event(EventKind.RECEIVE, "c", "a", 0, 0, 0, 0, "F", 0.0, 1.0, 5)
    assert wan_bytes([send("a", "b", 7), send("a", "c", 5), received], cluster()) == 5
