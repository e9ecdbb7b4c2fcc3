"""Cloudless-Training's elastic scheduling: which devices each region of a geo-distributed training rents.

Data stay in their regions: region r trains on D_r samples. It may rent up to C_r units (devices) of p_r samples per
second and c_r US dollars per hour each. The slowest region, with all of its units, determines the run time t*. Every
other region rents only as many units, n_r, as it needs to finish in t*::

    t*  = max over r of D_r / (C_r p_r)
    n_r = ceil(D_r / (p_r t*))
    saving = 1 - sum of n_r c_r / sum of C_r c_r, at the same run time

The formulas are assumed, since the public text of the paper (arXiv 2303.05330) has none. Assumed as well: a region may
rent units of several kinds, chosen by `_enough_units`, which for units of one kind gives the ``ceil(...)`` above; and
all units are paid until the slowest region is done.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Share of the needed speed that counts as enough, because of rounding errors in sums of speeds.
_ENOUGH_SHARE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Unit:
    """A device that can be rented.

    Attributes:
        name: Name of the device.
        samples_per_s: Speed, samples per second.
        price_per_hour: Price, US dollars per hour.
    """

    name: str
    samples_per_s: float
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """The samples that a region trains on, and the units that it may rent.

    Attributes:
        samples: Number of samples of a step or of an epoch, above zero.
        units: Units for rent, at least one.
    """

    samples: float
    units: tuple[Unit, ...]


Offers = Mapping[str, RegionOffer]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The units that all regions rent.

    Attributes:
        units: Name of a region to its rented units, in the order of its offer.
        run_time_s: Time until the slowest region is done, seconds.
        price_per_hour: Price of all units, US dollars per hour.
    """

    units: Mapping[str, tuple[Unit, ...]]
    run_time_s: float
    price_per_hour: float


def greedy_schedule(offers: Offers) -> Schedule:
    """Return the schedule that rents every unit of every region, which is the fastest and most expensive one."""
    return _schedule(offers, {region: offer.units for region, offer in offers.items()})


def elastic_schedule(offers: Offers) -> Schedule:
    """Return the schedule as fast as `greedy_schedule` in which each region rents only the units that it needs."""
    return schedule_within(offers, greedy_schedule(offers).run_time_s)


def schedule_within(offers: Offers, run_time_s: float, kept: Collection[str] = ()) -> Schedule:
    """Return the schedule in which each region rents the units that it needs to finish in ``run_time_s`` seconds.

    A region that cannot finish in time rents all of its units. The units named in ``kept`` are rented in any case.
    """
    return _schedule(
        offers,
        {region: _with_kept(offer.units, offer.samples / run_time_s, kept) for region, offer in offers.items()},
    )


def _with_kept(units: tuple[Unit, ...], samples_per_s: float, kept: Collection[str]) -> tuple[Unit, ...]:
    """Return the units of `_enough_units` for what the kept units cannot do alone, and the kept units."""
    own = [unit for unit in units if unit.name in kept]
    missing = samples_per_s - sum(unit.samples_per_s for unit in own)
    others = tuple(unit for unit in units if unit.name not in kept)
    enough = missing <= (1 - _ENOUGH_SHARE) * samples_per_s
    chosen = {*own, *(() if enough or not others else _enough_units(others, missing))}
    return tuple(unit for unit in units if unit in chosen)


def _schedule(offers: Offers, units: Mapping[str, tuple[Unit, ...]]) -> Schedule:
    return Schedule(
        units,
        max(offer.samples / sum(unit.samples_per_s for unit in units[region]) for region, offer in offers.items()),
        sum(unit.price_per_hour for rented in units.values() for unit in rented),
    )


def _enough_units(units: tuple[Unit, ...], samples_per_s: float) -> tuple[Unit, ...]:
    """Return units that together process ``samples_per_s`` or more, at no more than twice the least possible price.

    This is a heuristic for covering a demand (Csirik et al., 1991). Units are taken in order of price per sample; the
    first units of this order are completed, in every possible way, by the cheapest single unit that is then enough.
    The cheapest of these sets is returned.
    """
    ordered = sorted(units, key=lambda unit: (unit.price_per_hour / unit.samples_per_s, -unit.samples_per_s))
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
