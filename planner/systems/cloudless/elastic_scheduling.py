"""Cloudless-Training's elastic scheduling: the units that each region of a geo-distributed training needs.

Data stay in their regions. Region r trains on D_r samples and may rent C_r units, each of p_r samples per second and
c_r US dollars per hour. The slowest region, with all its units, determines the run time t*; every other region rents
n_r units, only as many as it needs to finish in t*::

    t*  = max over r of D_r / (C_r p_r)
    n_r = ceil(D_r / (p_r t*))
    saving = 1 - sum of n_r c_r / sum of C_r c_r, at the same run time

The formulas are assumed, as the public text of the paper (arXiv 2303.05330) has none. Assumed as well: a region may
rent units of several kinds; those with the lowest price per sample come first, and the last one is the cheapest that
suffices, which is ``ceil(...)`` for units of one kind. All units are paid until the slowest region is done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traces.common.errors import InputError

# Share of the needed speed that suffices, since speeds are sums of floats.
_ENOUGH_SHARE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Unit:
    """A device, the smallest unit that can be rented.

    Attributes:
        name: Name that is unique over all regions.
        samples_per_s: Speed in samples per second.
        price_per_hour: Price in US dollars per hour.
    """

    name: str
    samples_per_s: float
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """A region's work and the units that it may rent for it.

    Attributes:
        samples: Samples of an epoch or of a step that it trains on, above zero.
        units: One unit or more.
    """

    samples: float
    units: tuple[Unit, ...]


Offers = Mapping[str, RegionOffer]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The units that all regions rent.

    Attributes:
        units: Region to the units that it rents, in the order of its offer.
        run_time_s: Time until the slowest region is done, seconds.
        price_per_hour: Price of all units, US dollars per hour.
    """

    units: Mapping[str, tuple[Unit, ...]]
    run_time_s: float
    price_per_hour: float

    @property
    def cost_usd(self) -> float:
        """Price of all units until the slowest region is done, US dollars."""
        return self.price_per_hour * self.run_time_s / 3600


def greedy_schedule(offers: Offers) -> Schedule:
    """Return the schedule that rents every unit: the fastest one, and the baseline of elastic scheduling."""
    return _schedule(offers, {region: offer.units for region, offer in offers.items()})


def elastic_schedule(offers: Offers) -> Schedule:
    """Return the schedule with the run time of `greedy_schedule` in which each region rents no more than it needs."""
    return schedule_within(offers, greedy_schedule(offers).run_time_s)


def schedule_within(offers: Offers, run_time_s: float) -> Schedule:
    """Return the units that each region needs to be done after ``run_time_s`` seconds.

    Raises:
        InputError: A region takes longer than ``run_time_s`` even with all its units.
    """
    fastest_s = greedy_schedule(offers).run_time_s
    if run_time_s < fastest_s:
        raise InputError(
            f"the training cannot be done in {run_time_s:g} s",
            valid=f"give {fastest_s:g} s or more, the time with every unit of every region",
        )
    return _schedule(
        offers, {region: _enough_units(offer.units, offer.samples / run_time_s) for region, offer in offers.items()}
    )


def _schedule(offers: Offers, units: Mapping[str, tuple[Unit, ...]]) -> Schedule:
    return Schedule(
        units,
        max(offer.samples / sum(unit.samples_per_s for unit in units[region]) for region, offer in offers.items()),
        sum(unit.price_per_hour for rented in units.values() for unit in rented),
    )


def _cheapest_first(units: Sequence[Unit]) -> list[Unit]:
    """Return units sorted by price per sample; of equal prices the fastest first, then in the order of the offer."""
    return sorted(units, key=lambda unit: (unit.price_per_hour / unit.samples_per_s, -unit.samples_per_s))


def _enough_units(units: tuple[Unit, ...], samples_per_s: float) -> tuple[Unit, ...]:
    """Return units with ``samples_per_s`` or more in all, at a cost of no more than twice the least possible.

    The heuristic for covering a demand (Csirik et al., 1991) takes units in order of price per sample, completes each
    prefix with the cheapest single unit that suffices, and returns the cheapest of these sets.
    """
    ordered = _cheapest_first(units)
    chosen, least_per_hour = ordered, math.inf
    taken: list[Unit] = []
    price_per_hour, missing = 0.0, samples_per_s * _ENOUGH_SHARE
    for count, unit in enumerate(ordered):
        sufficing = [each for each in ordered[count:] if each.samples_per_s >= missing]
        last = min(sufficing, key=lambda each: each.price_per_hour, default=None)
        if last is not None and price_per_hour + last.price_per_hour < least_per_hour:
            chosen, least_per_hour = [*taken, last], price_per_hour + last.price_per_hour
        if unit.samples_per_s < missing:
            taken.append(unit)
            price_per_hour += unit.price_per_hour
            missing -= unit.samples_per_s
    names = {unit.name for unit in chosen}
    return tuple(unit for unit in units if unit.name in names)
