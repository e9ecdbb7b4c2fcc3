"""Which links carry only what one device sends to another, against all paths of the cluster."""

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.network import own_link
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_scenario
from traces.trace import LinkTrace

STEADY = LinkTrace(np.array([0.0, 1.0]), np.array([1e6, 2e6]), 2.0)


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    """Four devices on hosts, some of which have a device's name, with links between any of them and some outages."""
    names = ["a", "b", "c", "d"]
    hosts = draw(st.lists(st.sampled_from(["", "a", "b", "box"]), min_size=4, max_size=4))
    devices = tuple(Device(name, "cpu", "here", 1, host=host) for name, host in zip(names, hosts, strict=True))
    ends = sorted({*names, *filter(None, hosts)})
    pairs = draw(
        st.lists(st.sampled_from([*permutations(ends, 2), *((end, end) for end in ends if end in hosts)]), unique=True)
    )
    links = [Link("here", "here", 1e6, 0.0)]
    for source, target in pairs:
        trace = draw(st.sampled_from([None, None, STEADY]))
        jitter_s, loss = draw(st.sampled_from([(0.0, 0.0), (0.0, 0.0), (0.001, 0.0), (0.0, 0.01)]))
        links.append(Link(source, target, 1e6, 0.0, trace, jitter_s=jitter_s, loss=loss))
    out = draw(st.lists(st.sampled_from(links), max_size=1))
    chain = chain_scenario([1.0] * 2, [1.0] * 2)
    faults = tuple(LinkOutage(link.name, 1.0, 2.0) for link in out)
    return Scenario("any", Cluster(devices, tuple(links)), chain.model, chain.training, faults=faults)


@given(clusters())
def test_a_link_of_its_own_is_on_no_other_path_and_never_changes(scenario: Scenario) -> None:
    cluster = scenario.cluster
    paths = {pair: cluster.path(*pair) for pair in permutations(cluster.by_name, 2)}
    out = {fault.link for fault in scenario.faults if isinstance(fault, LinkOutage)}
    for pair, path in paths.items():
        link, one_host = path[0], len({cluster.by_name[name].machine for name in pair}) == 1
        alone = [other for other, links in paths.items() if link in links] == [pair]
        steady = link.trace is None and link.jitter_s == 0 and link.loss == 0 and link.name not in out
        direct = len(path) == 1 and (link.source, link.target) == pair
        found = own_link(scenario, *pair)
        if found is not None:
            assert (found, one_host, alone, steady, direct) == (link, True, True, True, True)
        elif one_host and steady and direct:
            # A link that may also lead between two hosts does not count, even if no path uses it.
            assert not alone or set(pair) <= {device.machine for device in cluster.devices}
