"""What the relay can carry at all, and which links ask for more."""

from math import inf

from planner.check.paths import used_links
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario

# Of all its links together, on one core of a machine of 2024; measured, see docs/executor.md.
CARRIED_BPS = 1e9

_NAMED = 3


def too_fast(plan: Plan, scenario: Scenario) -> str | None:
    """Return that links which the plan uses are faster than the relay, in one sentence; None if none is."""
    fast = [link for link in used_links(plan, scenario) if _peak_bps(link) > CARRIED_BPS]
    if not fast:
        return None
    named = ", ".join(f"{link.name} ({_rate(_peak_bps(link))})" for link in fast[:_NAMED])
    more = f" and {len(fast) - _NAMED} more" if len(fast) > _NAMED else ""
    return (
        f"the relay carries about {CARRIED_BPS / 1e6:.0f} Mbit/s, over all links together: "
        f"{named}{more} can be slower in this run than the scenario says"
    )


def _peak_bps(link: Link) -> float:
    return link.bandwidth_bps if link.trace is None else float(link.trace.bandwidth_bps.max())


def _rate(bandwidth_bps: float) -> str:
    return f"{bandwidth_bps / 1e6:g} Mbit/s" if bandwidth_bps < inf else "unlimited"
