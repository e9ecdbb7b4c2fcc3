import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.kernel.events import Flow
from sim.network.shared_links import first_come_rates, max_min_rates

LINKS = "abcde"
SLACK = 1e-9


def flow(links: str, weight: int = 1, ceiling_bps: float = math.inf) -> Flow:
    return Flow(tuple(links), 1.0, weight, ceiling_bps, lambda time_s: None)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Flow], dict[str, float]]:
    capacity_bps = {link: draw(st.one_of(st.just(0.0), st.floats(1, 1e10))) for link in LINKS}
    ceilings = st.one_of(st.just(math.inf), st.floats(1, 1e10))
    flows = [
        flow("".join(path), draw(st.integers(1, 4)), draw(ceilings))
        for path in draw(st.lists(st.lists(st.sampled_from(LINKS), min_size=1, unique=True), min_size=1, max_size=8))
    ]
    taken = {link for each in flows for link in each.links}
    return flows, {link: rate for link, rate in capacity_bps.items() if link in taken}


@given(networks())
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_bottleneck(
    network: tuple[list[Flow], dict[str, float]],
) -> None:
    flows, capacity_bps = network
    rates = max_min_rates(flows, capacity_bps)
    both = list(zip(flows, rates, strict=True))
    load_bps = {link: sum(rate for each, rate in both if link in each.links) for link in capacity_bps}
    for link, capacity in capacity_bps.items():
        assert load_bps[link] <= capacity * (1 + SLACK)
    for each, rate in both:
        assert rate <= each.ceiling_bps * each.weight * (1 + SLACK)
        if rate >= each.ceiling_bps * each.weight * (1 - SLACK):
            continue
        # This is what makes the shares max-min fair: a full link on which no connection has more.
        assert any(
            load_bps[link] >= capacity_bps[link] * (1 - SLACK)
            and all(
                rate / each.weight >= other_rate / other.weight * (1 - SLACK)
                for other, other_rate in both
                if link in other.links
            )
            for link in each.links
        )


def test_shares_by_hand() -> None:
    # c halves 20; what the first leaves on a, 90, goes to the second.
    rates = max_min_rates([flow("ac"), flow("a"), flow("c")], {"a": 100.0, "c": 20.0})
    assert rates == pytest.approx([10.0, 90.0, 10.0])


def test_connections_count_and_windows_bind() -> None:
    # Three connections and one: 75 and 25. With 10 at most each, the three get 30 and the rest goes to the one.
    assert max_min_rates([flow("a", 3), flow("a")], {"a": 100.0}) == pytest.approx([75.0, 25.0])
    assert max_min_rates([flow("a", 3, 10.0), flow("a")], {"a": 100.0}) == pytest.approx([30.0, 70.0])


def test_an_outage_stops_those_who_cross_it_alone() -> None:
    assert max_min_rates([flow("ab"), flow("a")], {"a": 10.0, "b": 0.0}) == pytest.approx([0.0, 10.0])


@given(networks())
def test_who_came_first_has_the_links_as_if_alone(network: tuple[list[Flow], dict[str, float]]) -> None:
    flows, capacity_bps = network
    rates = first_come_rates(flows, capacity_bps)
    for link, capacity in capacity_bps.items():
        assert sum(rate for each, rate in zip(flows, rates, strict=True) if link in each.links) <= capacity * (
            1 + SLACK
        )
    for count in range(1, len(flows)):
        # Nobody who comes later changes anything.
        assert first_come_rates(flows[:count], capacity_bps) == rates[:count]
    first = flows[0]
    assert rates[0] == min(first.ceiling_bps * first.weight, *(capacity_bps[link] for link in first.links))


def test_first_come_by_hand() -> None:
    # The first takes all of c, and leaves 80 on a.
    rates = first_come_rates([flow("ac"), flow("a"), flow("c")], {"a": 100.0, "c": 20.0})
    assert rates == pytest.approx([20.0, 80.0, 0.0])
