"""How many units of each region a geo-distributed training needs: Cloudless-Training's elastic scheduling.

Data stay where they are. Region r trains on D_r samples and may rent C_r units of p_r samples per second at c_r an
hour. The slowest region, with all its units, sets the time; elsewhere what would only wait is not rented::

    t*  = max over r of D_r / (C_r p_r)
    n_r = ceil(D_r / (p_r t*))
    saving = 1 - sum of n_r c_r / sum of C_r c_r, at the same run time

Assumed, as the public text of the paper (arXiv 2303.05330) gives no formula. Assumed as well: a region may rent units
of several kinds; those that are cheapest for a sample come first, and the last one is the cheapest that suffices. Units
of one kind are ``ceil(...)`` of them then. All units are paid until the slowest region is done.

A schedule follows from the regions alone: when speeds, prices or what is there change, it is made again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from traces.common.errors import InputError

# Speeds are sums of floats: so much less than needed is enough.
_ENOUGH_SHARE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Unit:
    """What can be rented by itself: a device.

    Attributes:
        name: Unique over all regions.
        samples_per_s: Its speed.
        price_per_hour: US dollars.
    """

    name: str
    samples_per_s: float
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """A region's work and what it may rent for it.

    Attributes:
        samples: Those that it trains on, of an epoch or of a step, above zero.
        units: At least one.
    """

    samples: float
    units: tuple[Unit, ...]


Offers = Mapping[str, RegionOffer]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is rented.

    Attributes:
        units: Region to the units that it rents, in the order of its offer.
        run_time_s: Until the slowest region has trained on its samples, seconds.
        price_per_hour: Of all units, US dollars.
    """

    units: Mapping[str, tuple[Unit, ...]]
    run_time_s: float
    price_per_hour: float

    @property
    def cost_usd(self) -> float:
        """All units until the slowest region is done."""
        return self.price_per_hour * self.run_time_s / 3600


def greedy_schedule(offers: Offers) -> Schedule:
    """Return the schedule that rents every unit: as fast as possible, and what elastic scheduling is held against."""
    return _schedule(offers, {region: offer.units for region, offer in offers.items()})


def elastic_schedule(offers: Offers) -> Schedule:
    """Return the schedule that is as fast as with every unit, and rents in each region no more than that takes."""
    return schedule_within(offers, greedy_schedule(offers).run_time_s)


def schedule_within(offers: Offers, run_time_s: float) -> Schedule:
    """Return the units that each region needs to be done after ``run_time_s`` seconds.

    Raises:
        InputError: A region cannot be, with all its units.
    """
    fastest_s = greedy_schedule(offers).run_time_s
    if run_time_s < fastest_s:
        raise InputError(
            f"the training cannot be done in {run_time_s:g} s",
            valid=f"with every unit of every region it takes {fastest_s:g} s",
        )
    return _schedule(
        offers, {region: _enough_units(offer.units, offer.samples / run_time_s) for region, offer in offers.items()}
    )


def cheapest_schedule(offers: Offers, deadline_s: float) -> Schedule:
    """Return the schedule that costs least among those that are done at a deadline; the fastest of equal ones.

    Raises:
        InputError: Every unit together misses the deadline.
    """
    inside = [schedule_within(offers, deadline_s)]
    inside += [each for each in _schedules(offers) if each.run_time_s <= deadline_s]
    return min(inside, key=lambda each: (each.cost_usd, each.run_time_s))


def fastest_schedule(offers: Offers, budget_usd: float) -> Schedule:
    """Return the fastest schedule whose whole run costs no more than a budget.

    Raises:
        InputError: The cheapest one costs more.
    """
    schedules = list(_schedules(offers))
    affordable = [each for each in schedules if each.cost_usd <= budget_usd]
    if not affordable:
        least_usd = min(each.cost_usd for each in schedules)
        raise InputError(f"no schedule costs {budget_usd:g} $ or less", valid=f"the cheapest one costs {least_usd:g} $")
    return min(affordable, key=lambda each: (each.run_time_s, each.cost_usd))


def _schedules(offers: Offers) -> Iterator[Schedule]:
    """Schedules for every run time at which a region needs a unit more.

    Bisection would need a cost that only falls with the run time. Whole units make it a saw: what is rented stays the
    same until a region can do with one unit less, and is paid for longer meanwhile.
    """
    fastest_s = greedy_schedule(offers).run_time_s
    times_s = {fastest_s}
    for offer in offers.values():
        speeds = accumulate(unit.samples_per_s for unit in _cheapest_first(offer.units))
        times_s |= {offer.samples / speed for speed in speeds}
    yield from (schedule_within(offers, time_s) for time_s in sorted(times_s) if time_s >= fastest_s)


def _schedule(offers: Offers, units: Mapping[str, tuple[Unit, ...]]) -> Schedule:
    return Schedule(
        units,
        max(offer.samples / sum(unit.samples_per_s for unit in units[region]) for region, offer in offers.items()),
        sum(unit.price_per_hour for rented in units.values() for unit in rented),
    )


def _cheapest_first(units: Sequence[Unit]) -> list[Unit]:
    """Units by what a sample costs on them; of equal ones the fastest, then the one that was offered first."""
    return sorted(units, key=lambda unit: (unit.price_per_hour / unit.samples_per_s, -unit.samples_per_s))


def _enough_units(units: tuple[Unit, ...], samples_per_s: float) -> tuple[Unit, ...]:
    """The cheapest of these: some of the cheapest, and one that makes them enough; it is passed over afterwards.

    Published as a rule for covering a demand that costs no more than double the least (Csirik et al., 1991).
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
