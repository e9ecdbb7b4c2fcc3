"""The law of losses: steps are the inverse of the loss, and the fit finds a known law again, also for runs left out."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from planner.runs.convergence_fit import FIRST_SHARE, LossCurve, fit_law, held_out_errors
from planner.runs.published_laws import published_law
from planner.scenario.convergence import MOST_PRICE, SHAPE, LossLaw, TrainingMode
from traces.common.errors import InputError

BATCH = 32
MODES = [
    TrainingMode("allreduce", BATCH),
    *(TrainingMode("diloco", BATCH, workers, every) for workers in (2, 4, 8) for every in (5, 20, 50)),
]
MEAN = (math.log(1.1), math.log(0.9), math.log(0.4), math.log(1 / 500), 0.0, 0.04, 0.2, 0.04, 0.0, 0.0, 0.0, 0.0, 0.0)
TRUE = LossLaw(
    "made up",
    1e4,
    MEAN,
    (MEAN,),
    ("diloco",),
    ("none",),
    50,
    8,
)


def curves(noise: float, seed: int = 0) -> list[LossCurve]:
    random = np.random.default_rng(seed)
    made = []
    for mode in MODES:
        for _ in range(2):
            made.append(curve_of(mode, lambda step, of=mode: TRUE.loss(of, step) * math.exp(random.normal(0, noise))))
    return made


def curve_of(mode: TrainingMode, loss: Callable[[int], float]) -> LossCurve:
    """Return the curve of 400 steps after which the loss is measured ten times."""
    steps = tuple(step for step in range(40, 401, 40) if step >= FIRST_SHARE * 400)
    return LossCurve(mode, steps, tuple(map(loss, steps)))


def test_steps_are_the_inverse_of_the_loss() -> None:
    for mode in MODES:
        steps = TRUE.steps_to(TRUE.loss(mode, 300), mode)
        assert steps.expected == pytest.approx(300)
        # Without uncertainty the interval is a point.
        assert (steps.least, steps.most, steps.share) == pytest.approx((300, 300, 1))


def test_steps_are_the_inverse_of_the_loss_also_where_the_price_grows() -> None:
    """Before, between and after the knots, the last of which is at 20,000 samples."""
    mean = (*MEAN[:4], 0.4, *MEAN[5:], *[0.0] * 3)
    law = replace(TRUE, mean=mean, draws=(mean,), knots=(math.log(0.2), 0.0, math.log(2.0)))
    for mode in MODES:
        for count in (40, 300, 3000):
            assert law.steps_to(law.loss(mode, count), mode).expected == pytest.approx(count, rel=1e-3)
    prices = [
        law.steps_to(loss, MODES[-1]).expected / law.steps_to(loss, MODES[0]).expected for loss in (2.4, 2.0, 1.6)
    ]
    assert prices == sorted(prices)
    assert prices[0] < 0.9 * prices[-1]


def test_outer_steps_cost_as_many_times_the_steps_as_their_price_for_every_loss() -> None:
    for mode in MODES:
        for loss in (3.0, 2.0, 1.3):
            steps, synchronous = TRUE.steps_to(loss, mode), TRUE.steps_to(loss, MODES[0])
            assert steps.expected == pytest.approx(TRUE.price(mode) * synchronous.expected)


def test_a_price_of_more_than_the_most_and_a_loss_below_the_floor_are_never_reached() -> None:
    floor = math.exp(TRUE.mean[SHAPE.index("floor")])
    dear = replace(TRUE, mean=(*MEAN[:-3], 50 * math.log(MOST_PRICE), 0.0, 0.0))
    dear = replace(dear, draws=(dear.mean,))
    for law, loss, mode in ((dear, 2.0, TrainingMode("diloco", BATCH, 8, 5)), (TRUE, 0.99 * floor, MODES[0])):
        assert not law.steps_to(loss, mode).converges
        assert law.steps_to(loss, mode).expected == math.inf
    assert dear.steps_to(2.0, MODES[0]).converges


@pytest.mark.slow
def test_the_fit_finds_a_known_law_again() -> None:
    law = fit_law(curves(noise=0.02), "made up")
    for mode in MODES:
        expected = TRUE.steps_to(TRUE.loss(mode, 400), mode).expected
        found = law.steps_to(TRUE.loss(mode, 400), mode)
        assert found.expected == pytest.approx(expected, rel=0.1)
        assert found.least < expected < found.most
    assert law.price(MODES[-1]) == pytest.approx(TRUE.price(MODES[-1]), rel=0.1)
    assert not law.covers(replace(MODES[-1], interval_steps=100))
    assert not law.covers(replace(MODES[-1], compression="int4"))
    assert not law.covers(replace(MODES[-1], momentum=0.0))


def test_steps_of_left_out_workers_and_intervals_are_found() -> None:
    errors = held_out_errors(curves(noise=0.01), "made up")
    assert len(errors) == 9
    assert float(np.median(list(errors.values()))) <= 0.1


def test_the_fit_follows_losses_that_fall_by_no_power_law() -> None:
    """A plateau, a fall and another plateau, and methods that need up to 1.6 times as many steps."""
    prices = {mode: (mode.workers * mode.interval_steps**0.5) ** 0.1 for mode in MODES}

    def loss(step: float) -> float:
        return 2.5 + 1.0 / (1 + (step / 120) ** 4)

    made = [curve_of(mode, lambda step, of=price: loss(step / of)) for mode, price in prices.items()]
    law = fit_law(made, "made up", count=0)
    for mode, price in prices.items():
        assert law.steps_to(2.6, mode).expected == pytest.approx(120 * price * (1 / 0.1 - 1) ** 0.25, rel=0.05)
        assert law.loss(mode, law.steps_to(2.6, mode).expected) == pytest.approx(2.6, rel=1e-3)


def test_losses_are_relative_to_those_of_synchronous_training() -> None:
    with pytest.raises(InputError, match="no run has the method 'allreduce'"):
        fit_law([LossCurve(MODES[1], (1, 2), (2.0, 1.0))], "nothing")


def test_published_laws_say_what_their_sources_say() -> None:
    law = published_law(1_000_000_000, 2048)
    steps = law.steps_to(law.loss(TrainingMode("allreduce", 512), 10_000), TrainingMode("allreduce", 512))
    assert steps.expected == pytest.approx(10_000)
    # The price in samples is that in the loss where 30 % of the loss are above the floor.
    loss = math.exp(law.mean[SHAPE.index("floor")]) / 0.7
    steps = law.steps_to(loss, TrainingMode("allreduce", 512))
    workers = TrainingMode("diloco", 512, workers=8, momentum=0.0)
    assert law.loss(workers, steps.expected) / loss == pytest.approx(8**0.0116, rel=0.003)
