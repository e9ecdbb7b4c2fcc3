import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.fairshare import max_min_rates

LINKS = "abcde"
SLACK = 1e-9


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[list[str]], dict[str, float]]:
    capacity_bps = {link: draw(st.one_of(st.just(0.0), st.floats(1, 1e10))) for link in LINKS}
    paths = draw(st.lists(st.lists(st.sampled_from(LINKS), min_size=1, unique=True), min_size=1, max_size=8))
    return paths, {link: rate for link, rate in capacity_bps.items() if any(link in path for path in paths)}


@settings(deadline=None)
@given(networks())
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_bottleneck(
    network: tuple[list[list[str]], dict[str, float]],
) -> None:
    paths, capacity_bps = network
    rates = max_min_rates(paths, capacity_bps)
    load_bps = {
        link: sum(rate for rate, path in zip(rates, paths, strict=True) if link in path) for link in capacity_bps
    }
    for link, capacity in capacity_bps.items():
        assert load_bps[link] <= capacity * (1 + SLACK)
    for rate, path in zip(rates, paths, strict=True):
        # This is what makes the shares max-min fair: a full link on which nobody has more.
        assert any(
            load_bps[link] >= capacity_bps[link] * (1 - SLACK)
            and all(rate >= other * (1 - SLACK) for other, taken in zip(rates, paths, strict=True) if link in taken)
            for link in path
        )


def test_shares_by_hand() -> None:
    # c halves 20; what the first leaves on a, 90, goes to the second.
    rates = max_min_rates([["a", "c"], ["a"], ["c"]], {"a": 100.0, "c": 20.0})
    assert rates == pytest.approx([10.0, 90.0, 10.0])


def test_an_outage_stops_those_who_cross_it_alone() -> None:
    assert max_min_rates([["a", "b"], ["a"]], {"a": 10.0, "b": 0.0}) == pytest.approx([0.0, 10.0])
