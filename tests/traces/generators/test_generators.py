from collections.abc import Callable

import numpy as np
import pytest

from traces import generators
from traces.common.errors import InputError
from traces.generators.presets import PRESETS, generate, preset
from traces.generators.stochastic import fit_lognormal
from traces.statistics import describe
from traces.trace import LinkTrace

STATES = [(10e6, 5.0), (2e6, 15.0), (0.0, 1.0)]

BY_CHANCE: dict[str, Callable[[int], LinkTrace]] = {
    "markov": lambda seed: generators.markov(STATES, duration_s=500, seed=seed),
    "ornstein_uhlenbeck": lambda seed: generators.ornstein_uhlenbeck(
        1e6, coefficient_of_variation=0.5, correlation_s=10, duration_s=500, seed=seed
    ),
    **{name: lambda seed, name=name: preset(name, duration_s=500, seed=seed) for name in PRESETS},  # type: ignore[misc]
}


@pytest.mark.parametrize("make", BY_CHANCE.values(), ids=BY_CHANCE)
def test_the_seed_alone_decides(make: Callable[[int], LinkTrace]) -> None:
    assert make(7) == make(7)
    assert make(7) != make(8)
    assert make(7).duration_s == 500


def test_constant_and_step() -> None:
    assert generators.constant(5e6, duration_s=3).bits_between(0, 2) == 10e6
    trace = generators.step([(0, 1e6), (10, 0), (12, 3e6)], duration_s=20)
    assert trace.bandwidth_at([0, 10, 11.9, 12, 20]).tolist() == [1e6, 0, 0, 3e6, 1e6]


def test_outages_once_and_again() -> None:
    once = generators.outage(8e6, start_s=2, length_s=3, duration_s=20)
    assert (once.times_s.tolist(), once.bandwidth_bps.tolist()) == ([0, 2, 5], [8e6, 0, 8e6])
    again = generators.outage(8e6, start_s=0, length_s=1, every_s=5, duration_s=10.5)
    assert (again.times_s.tolist(), again.bandwidth_bps.tolist()) == ([0, 1, 5, 6, 10], [0, 8e6, 0, 8e6, 0])


def test_a_day_swings_around_its_mean() -> None:
    trace = generators.diurnal(100e6, amplitude_share=0.4, duration_s=86_400, step_s=600)
    assert trace.mean_bps == pytest.approx(100e6, rel=1e-12)
    assert trace.bandwidth_at(21_600) == pytest.approx(140e6, rel=1e-3)
    assert trace.bandwidth_at(64_800) == pytest.approx(60e6, rel=1e-3)


def test_markov_states_take_their_share_of_the_time() -> None:
    trace = generators.markov(STATES, duration_s=300_000, seed=1)
    lengths_s = np.diff(trace.times_s, append=trace.duration_s)
    for rate_bps, dwell_s in STATES:
        dwells_s = lengths_s[trace.bandwidth_bps == rate_bps]
        assert dwells_s.mean() == pytest.approx(dwell_s, rel=0.03)
        assert dwells_s.sum() / trace.duration_s == pytest.approx(dwell_s / 21, rel=0.04)


def test_ornstein_uhlenbeck_forgets_after_its_correlation_time() -> None:
    trace = generators.ornstein_uhlenbeck(
        1e6, coefficient_of_variation=0.5, correlation_s=20, duration_s=200_000, seed=1
    )
    logarithms = np.log(trace.bandwidth_bps)
    assert np.corrcoef(logarithms[:-20], logarithms[20:])[0, 1] == pytest.approx(np.exp(-1), abs=0.03)


@pytest.mark.parametrize(
    ("mean", "variation", "maximum"),
    [(501, 0.87, 1920), (30, 1.43, 533), (1, 0.5, 1.3), (1, 0.05, 1.2), (1, 1, 1e9)],
)
def test_a_cut_lognormal_has_the_moments_asked_for(mean: float, variation: float, maximum: float) -> None:
    centre, spread = fit_lognormal(mean, variation, maximum)
    # A sum over the normal density, wide and fine enough that its own error is far below the tolerance.
    deviations = np.linspace(-12, 12, 400_001)
    weights = np.exp(-(deviations**2) / 2)
    weights /= weights.sum()
    rates = np.minimum(np.exp(centre + spread * deviations), maximum)
    found_mean = float(weights @ rates)
    assert found_mean == pytest.approx(mean, rel=1e-4)
    assert np.sqrt(weights @ rates**2 / found_mean**2 - 1) == pytest.approx(variation, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_statistics(name: str) -> None:
    expected, found = PRESETS[name], describe(preset(name, duration_s=400_000, seed=3))
    # About four standard errors of a mean over so many correlated samples.
    error = 4 * expected.coefficient_of_variation * np.sqrt(2 * expected.correlation_s / found.duration_s)
    assert found.mean_bps == pytest.approx(expected.mean_bps, rel=error)
    assert found.coefficient_of_variation == pytest.approx(expected.coefficient_of_variation, rel=0.05)
    assert found.zero_share == pytest.approx(expected.zero_share, abs=0.01)
    assert found.maximum_bps <= expected.maximum_bps


def test_the_outages_of_a_satellite_come_in_bursts() -> None:
    trace = preset("satellite", duration_s=200_000, seed=3)
    outages_s = np.diff(trace.times_s, append=trace.duration_s)[trace.bandwidth_bps == 0]
    # Independent seconds would be out for 1 / (1 - 0.16) = 1.2 s at a time.
    assert 2.5 < outages_s.mean() < 4.5
    assert outages_s.max() > 10


def test_outage_bursts_leave_the_rest_and_the_latency_as_they_are() -> None:
    trace = LinkTrace(np.array([0.0, 0.25, 500.5]), np.array([1.0, 2.0, 3.0]), 1000.0, np.array([0.1, 0.2, 0.3]))
    cut = generators.with_outage_bursts(trace, zero_share=0.3, mean_outage_s=5, seed=2)
    up = cut.bandwidth_bps > 0
    assert 0.1 < describe(cut).zero_share < 0.5
    assert cut.bandwidth_bps[up].tolist() == trace.bandwidth_at(cut.times_s[up]).tolist()
    assert cut.latency_s is not None
    assert trace.latency_s is not None
    assert cut.latency_s.tolist() == trace.latency_s[trace.piece_at(cut.times_s)].tolist()


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"unknown preset 'satelite'; did you mean 'satellite'.*hsdpa"):
        preset("satelite", duration_s=1, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generators.outage(1, start_s=9, length_s=1, duration_s=5), "starts at 9 s is outside of the trace"),
        (lambda: generators.outage(1, start_s=0, length_s=2, every_s=2, duration_s=5), "2 s every 2 s"),
        (
            lambda: generators.diurnal(1, amplitude_share=1.5, duration_s=5),
            "the amplitude is 1.5 of the mean",
        ),
        (lambda: generators.markov([(1, 1)], duration_s=5, seed=0), "a Markov trace of 1 states"),
        (lambda: generators.markov([(1, 1), (2, 0.5)], duration_s=5, seed=0), "a mean dwell time of 0.5 s"),
        (lambda: generators.step([(1, 1)], duration_s=5), "the first time is 1 s"),
        (lambda: preset("lte", duration_s=0, seed=0), "the duration is 0 s"),
        (lambda: fit_lognormal(1, 0.5, 1.2), "no rates up to 1.2 have mean 1"),
    ],
)
def test_wrong_parameters_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "parameters", "pieces"),
    [
        ("constant", {"bandwidth": "10 Mbit/s"}, 1),
        ("step", {"points": "0 s: 10 Mbit/s, 30 s: 0 bit/s"}, 2),
        ("outage", {"bandwidth": "10 Mbit/s", "start": "5 s", "length": "500 ms", "every": "20 s"}, 7),
        ("diurnal", {"mean": "10 Mbit/s", "amplitude_share": "0.3", "period": "1 h"}, 60),
        (
            "ornstein-uhlenbeck",
            {"mean": "1 Gbit/s", "coefficient_of_variation": "0.2", "correlation": "9 s"},
            60,
        ),
        ("lte", {}, 60),
    ],
)
def test_generating_by_name(name: str, parameters: dict[str, str], pieces: int) -> None:
    trace = generate(name, parameters, duration_s=60, seed=0, step_s=1)
    assert (trace.duration_s, len(trace.times_s)) == (60, pieces)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("outge", {}, "unknown preset or generator 'outge'; did you mean 'outage'"),
        ("lte", {"mean": "1 Mbit/s"}, "'lte' has no parameter 'mean'; it takes none"),
        ("constant", {"rate": "1 Mbit/s"}, "'constant' has no parameter 'rate'; it takes bandwidth"),
        ("outage", {"bandwidth": "1 Mbit/s"}, "'outage' lacks the parameter 'start'"),
        ("constant", {"bandwidth": "10"}, "bandwidth: '10' has no unit"),
        ("step", {"points": "0 s"}, "points: '0 s' is not a pair"),
        (
            "diurnal",
            {"mean": "1 Mbit/s", "amplitude_share": "much"},
            "amplitude_share: 'much' is not a number",
        ),
    ],
)
def test_generating_by_name_refuses(name: str, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(name, parameters, duration_s=60, seed=0, step_s=1)
