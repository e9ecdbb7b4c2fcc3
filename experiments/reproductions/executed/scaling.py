"""The same comparison with fewer bytes, and in less time or more: what two cores can carry and wait for.

Divide all bytes and all rates by one number and no time changes; divide all times and multiply all rates by another and
every ratio of two times stays. So a plan wins by as much in the scaled scenario as in the whole one, up to the rounding
of bytes (tests/experiments/reproductions/test_scaling.py), and what a real run of it adds is what this machine adds.
"""

from dataclasses import replace

from planner.scenario.cluster import Cluster, Link
from planner.scenario.profile import LayerProfile, TimeTable
from planner.scenario.scenario import Scenario
from traces.trace import LinkTrace

# Payloads are rows of numbers of this size.
_NUMBER_BYTES = 4


def scaled(scenario: Scenario, smaller: float, quicker: float) -> Scenario:
    """Return a scenario of fewer bytes and shorter times; devices keep their memory, and what fitted still fits.

    Args:
        scenario: The whole one.
        smaller: So many times fewer bytes.
        quicker: So many times less time.
    """
    bandwidth = quicker / smaller
    cluster = scenario.cluster
    devices = tuple(replace(each, interface_bps=each.interface_bps * bandwidth) for each in cluster.devices)
    links = tuple(_link(each, bandwidth, quicker) for each in cluster.links)
    layers = tuple(_layer(each, smaller, quicker) for each in scenario.model.layers)
    return replace(scenario, cluster=Cluster(devices, links), model=replace(scenario.model, layers=layers), faults=())


def _link(link: Link, bandwidth: float, quicker: float) -> Link:
    assert link.size_curve is None, "its sizes would have to be scaled too"
    trace = link.trace and _trace(link.trace, bandwidth, quicker)
    return replace(
        link,
        bandwidth_bps=link.bandwidth_bps * bandwidth,
        latency_s=link.latency_s / quicker,
        jitter_s=link.jitter_s / quicker,
        trace=trace,
    )


def _trace(trace: LinkTrace, bandwidth: float, quicker: float) -> LinkTrace:
    latency_s = trace.latency_s
    return replace(
        trace,
        times_s=trace.times_s / quicker,
        bandwidth_bps=trace.bandwidth_bps * bandwidth,
        duration_s=trace.duration_s / quicker,
        latency_s=None if latency_s is None else latency_s / quicker,
    )


def _layer(layer: LayerProfile, smaller: float, quicker: float) -> LayerProfile:
    def fewer(size_bytes: int) -> int:
        numbers = round(size_bytes / smaller / _NUMBER_BYTES)
        return _NUMBER_BYTES * max(numbers, int(size_bytes > 0))

    return replace(
        layer,
        parameter_bytes=fewer(layer.parameter_bytes),
        output_bytes=fewer(layer.output_bytes),
        activation_bytes=fewer(layer.activation_bytes),
        times={kind: _table(table, quicker) for kind, table in layer.times.items()},
        update_s={kind: seconds / quicker for kind, seconds in layer.update_s.items()},
    )


def _table(table: TimeTable, quicker: float) -> TimeTable:
    def less(times_s: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(each / quicker for each in times_s)

    return TimeTable(table.samples, less(table.forward_s), less(table.backward_input_s), less(table.backward_weight_s))
