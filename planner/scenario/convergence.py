"""How many steps training takes to a loss, by the method of synchronisation: a fitted law with its uncertainty.

After n steps of B samples the loss of a task is

    L = (E + A (D / D_0)^-a) exp(c(D)),        D = S exp(-x b (1 + g ln(S / D_0))),        S = n B / (1 + k B).

E is the loss that is never undercut; A and a are scale and exponent of the power law in the samples D, counted from
D_0, the law's reference; 1 / k is the critical batch, from which larger batches help little (McCandlish et al., arXiv
1812.06162). Losses of short runs do not fall by a power law; c corrects it between some numbers of samples, the knots,
linearly in the logarithm of the samples, and is constant outside.

S / D is the price of outer steps, 1 for ``allreduce``: how many times as many steps they need. Its exponent x b sums,
over the terms of `TERMS`, a coefficient times what the settings have of the term. In a run it grows at the rate g, but
only between the first and the last knot.

DiLoCo's scaling laws (arXiv 2503.09799) multiply the loss by a power of the workers instead. In our runs the ratio of
two methods' steps to a loss grows slowly as losses fall (of averages after every 20 steps from 1.25 to 1.49, after
every 5 steps from 1.10 to 1.16), that of their losses after equally many steps faster.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Parameters of the law: logarithms of E, A, a and k, and g; then the coefficients of the price, then c at each knot.
SHAPE = ("floor", "scale", "exponent", "inverse critical batch", "growth of the price")
TERMS = (
    "outer steps",
    "workers",
    "interval",
    "streaming",
    "compression",
    "frequency",
    "averages",
    "interval of averages",
)

_PRICE = slice(len(SHAPE), len(SHAPE + TERMS))

# From where, below the first knot, and at how many places losses are searched for.
_EARLIER, _GRID = 5.0, 400

# The share of possible laws that an interval holds; and the least share that must reach a loss, so that a plan counts
# on reaching it.
CONFIDENCE, LEAST_SHARE = 0.9, 0.9

# A method that needs more steps than this many times those of synchronous training counts as not converging.
MOST_PRICE = 20.0

ALLREDUCE = "allreduce"


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """What the number of steps to a loss depends on.

    Attributes:
        method: Method of synchronisation, one of `planner.plan.plan.METHODS`.
        global_batch: Samples of a step over all workers.
        workers: Number of workers that train separately; 1 for ``allreduce``.
        interval_steps: Steps between two exchanges.
        fragments: Number of groups of layers that are exchanged one after the other.
        compression: Format of pseudo-gradients, one of `planner.plan.outer_step.OUTER_COMPRESSIONS`.
        momentum: Nesterov momentum of the outer step; 0 is the average of the workers.
    """

    method: str
    global_batch: int
    workers: int = 1
    interval_steps: int = 1
    fragments: int = 1
    compression: str = "none"
    momentum: float = 0.9

    @property
    def terms(self) -> tuple[float, ...]:
        """What the settings have of each of `TERMS`, without unit."""
        if self.method == ALLREDUCE:
            return (0.0,) * len(TERMS)
        several = float(self.workers > 1)
        interval, averages = several * math.log(self.interval_steps), float(not self.momentum)
        return (
            1.0,
            math.log(self.workers),
            interval,
            float(self.method != "diloco"),
            float(self.compression in ("int8", "int4")),
            1 / self.interval_steps if self.momentum and self.method == "diloco" else 0.0,
            several * averages,
            interval * averages,
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to a loss; infinite if it is never reached.

    Attributes:
        expected: Steps by the fitted law.
        least: Lower end of the interval that holds them with `CONFIDENCE`.
        most: Upper end of the interval.
        share: Share of the laws that the fit leaves possible by which the loss is reached.
    """

    expected: float
    least: float
    most: float
    share: float

    @property
    def converges(self) -> bool:
        """Whether a plan may count on reaching the loss."""
        return math.isfinite(self.expected) and self.share >= LEAST_SHARE


@dataclass(frozen=True, slots=True)
class LossLaw:
    """The law of a task: the fitted parameters, and others that are possible, too.

    Attributes:
        source: What the law is from, in words.
        reference_samples: Samples D_0 at which the power law is A.
        mean: Parameters in the order of `SHAPE`, `TERMS` and ``knots``.
        draws: Parameters drawn from their distribution, [draws, parameters]; at least one.
        methods: Methods of synchronisation that the law covers.
        compressions: Formats of pseudo-gradients that it covers.
        momenta: Momenta of the outer step that it covers.
        knots: Logarithms of D / D_0 between which the power law is corrected, rising.
        most_interval: Largest interval that it covers, steps; longer ones are never proposed.
        most_workers: Largest number of workers that was measured; the law extrapolates to more.
        least_loss: Lowest loss that was measured; the law extrapolates to lower ones. 0 if nothing was.
    """

    source: str
    reference_samples: float
    mean: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]
    methods: tuple[str, ...]
    compressions: tuple[str, ...]
    most_interval: int
    most_workers: int
    least_loss: float = 0.0
    momenta: tuple[float, ...] = (0.9,)
    knots: tuple[float, ...] = ()

    def covers(self, mode: TrainingMode) -> bool:
        """Return whether method, compression, momentum and interval are among those that the law knows."""
        if mode.method == ALLREDUCE:
            return True
        return (
            mode.method in self.methods
            and mode.compression in self.compressions
            and mode.momentum in self.momenta
            and mode.interval_steps <= self.most_interval
        )

    def loss(self, mode: TrainingMode, steps: float) -> float:
        """Return the loss after a number of steps by the fitted parameters."""
        point = (np.array([mode.terms]), np.array([mode.global_batch]), np.array([steps]))
        return math.exp(log_losses(np.array(self.mean), *point, self.reference_samples, np.array(self.knots))[0])

    def steps_to(self, loss: float, mode: TrainingMode) -> Steps:
        """Return the steps after which the loss is reached, with their interval."""
        expected = float(self._steps_to(np.array([self.mean]), mode, loss)[0])
        drawn = np.sort(self._steps_to(np.array(self.draws), mode, loss))
        low, high = (round(share * (len(drawn) - 1)) for share in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
        return Steps(expected, float(drawn[low]), float(drawn[high]), float(np.isfinite(drawn).mean()))

    def price(self, mode: TrainingMode) -> float:
        """Return how many times as many steps as ``allreduce`` the method needs to the loss of D_0 samples of S."""
        return math.exp(float(np.dot(self.mean[_PRICE], mode.terms)))

    def _steps_to(self, parameters: Floats, mode: TrainingMode, loss: float) -> Floats:
        """Return the steps to a loss by each row of ``parameters``; infinity where it is never reached."""
        inverse, knots = np.exp(parameters[:, 3]), np.array(self.knots)
        places = _places_of(loss, parameters, knots)
        prices = _log_prices(places, parameters[:, 4], parameters[:, _PRICE] @ np.array(mode.terms), knots)
        steps = self.reference_samples * np.exp(places + prices) * (1 + inverse * mode.global_batch) / mode.global_batch
        return np.where(prices <= math.log(MOST_PRICE), np.maximum(steps, 1.0), np.inf)


def log_losses(
    parameters: Floats, terms: Floats, batches: Floats, steps: Floats, reference_samples: float, knots: Floats
) -> Floats:
    """Return the logarithm of the loss at several points, [points].

    Args:
        parameters: Parameters of the law, [parameters].
        terms: `TrainingMode.terms` of each point, [points, terms].
        batches: Global batch of each point, samples, [points].
        steps: Number of steps before each point, [points].
        reference_samples: As in `LossLaw`.
        knots: As in `LossLaw`, [knots].
    """
    inverse = np.exp(parameters[3])
    seen = np.log(steps * batches / (1 + inverse * batches) / reference_samples)
    places = seen - (terms @ parameters[_PRICE]) * (1 + parameters[4] * _growing(seen, knots))
    return _log_losses_at(places, parameters, knots)


def _growing(seen: Floats, knots: Floats) -> Floats:
    """Return ln(S / D_0) between the first and the last knot, beyond which prices stay as they are."""
    return np.clip(seen, knots[0], knots[-1]) if len(knots) else np.zeros_like(seen)


def _log_prices(places: Floats, growth: Floats, exponents: Floats, knots: Floats) -> Floats:
    """Return the logarithm of S / D where ln(D / D_0) is ``places``; infinity where it outgrows the samples."""
    if not len(knots):
        return exponents
    slope = 1 - exponents * growth
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.where(slope > 0, (places + exponents) / slope, np.inf)
    return np.where(slope > 0, exponents * (1 + growth * _growing(seen, knots)), np.inf)


def _log_losses_at(places: Floats, parameters: Floats, knots: Floats) -> Floats:
    """Return the logarithm of the loss at the logarithms of some D / D_0, [places]."""
    floor, scale, exponent = np.exp(parameters[:3])
    corrections = np.interp(places, knots, parameters[_PRICE.stop :]) if len(knots) else 0.0
    return np.asarray(np.log(floor + scale * np.exp(-exponent * places)) + corrections)


def _places_of(loss: float, parameters: Floats, knots: Floats) -> Floats:
    """Return the first ln(D / D_0) at which the loss is reached, by each row of ``parameters``; infinity if never."""
    floor, scale, exponent = np.exp(parameters[:, :3]).T
    # After the last knot the correction is constant.
    target = loss / np.exp(parameters[:, -1]) if len(knots) else np.full(len(parameters), loss)
    with np.errstate(divide="ignore"):
        places = np.log(scale / np.maximum(target - floor, 0)) / exponent
    if not len(knots):
        return np.asarray(places)
    grid = np.linspace(knots[0] - _EARLIER, knots[-1], _GRID)
    for row, each in enumerate(parameters):
        heights = np.minimum.accumulate(_log_losses_at(grid, each, knots)) - math.log(loss)
        first = int(np.argmax(heights <= 0))
        if heights[first] > 0:
            places[row] = max(places[row], knots[-1])
        elif first == 0:
            places[row] = grid[0]
        else:
            before, after = heights[first - 1], heights[first]
            places[row] = grid[first] - (grid[1] - grid[0]) * after / (after - before)
    return np.asarray(places)
