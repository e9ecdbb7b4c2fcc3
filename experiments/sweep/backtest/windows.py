"""Scenarios of one window of a trace: the links as they were, what was known before, and what is known in hindsight."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario, in_window
from traces.common.errors import InputError, find_by_name
from traces.trace import LinkTrace


@dataclass(frozen=True, slots=True)
class Window:
    """A scenario in a window of a trace.

    Attributes:
        actual: The scenario whose links play the trace from the start of the window on.
        known: The scenario with constant links, as known at the start of the window: the means of the trace from its
            beginning to that moment, or for a window at the beginning of the trace the declared rates and latencies.
        in_hindsight: The scenario with constant links, whose rates and latencies are the means of the window itself.
    """

    actual: Scenario
    known: Scenario
    in_hindsight: Scenario


def window_of(
    scenario: Scenario, links: Collection[str], trace: LinkTrace, start_s: float, window_s: float, *, scaled: bool
) -> Window:
    """Return the window of a trace that begins at ``start_s``.

    All links named in ``links`` play the trace at the same moments, with ``scaled`` at their own declared mean rates.
    Other links keep their own rates or traces, which begin with the window.
    """

    def traced(link: Link, from_s: float) -> Link:
        played = scaled_to(trace, link.bandwidth_bps) if scaled else trace
        return replace(link, trace=beginning_at(played, from_s))

    def changed(change: Callable[[Link], Link]) -> Scenario:
        return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(map(change, scenario.cluster.links))))

    actual = changed(lambda link: traced(link, start_s) if link.name in links else link)
    known = changed(lambda link: replace(link, trace=None))
    if start_s > 0:
        before = changed(lambda link: traced(link, 0.0) if link.name in links else replace(link, trace=None))
        known = in_window(before, 0.0, start_s)
    return Window(actual, known, in_window(actual, 0.0, window_s))


def beginning_at(trace: LinkTrace, start_s: float) -> LinkTrace:
    """Return the trace from ``start_s`` on, which at its end continues with its beginning."""
    if start_s == 0:
        return replace(trace, loops=True, ends=False)
    first = int(trace.piece_at(start_s))
    rest_s, before_s = trace.times_s[first + 1 :] - start_s, trace.times_s[: first + 1] + (trace.duration_s - start_s)
    times_s = np.concatenate(([0.0], rest_s, before_s))
    order = np.r_[first : len(trace.times_s), 0 : first + 1]
    # A piece that begins exactly at `start_s` would appear a second time at the end, with no length.
    kept = np.diff(times_s, append=trace.duration_s) > 0
    latency_s = None if trace.latency_s is None else trace.latency_s[order][kept]
    return LinkTrace(times_s[kept], trace.bandwidth_bps[order][kept], trace.duration_s, latency_s)


def scaled_to(trace: LinkTrace, mean_bps: float) -> LinkTrace:
    """Return the trace with all rates multiplied by one factor, so that their mean is ``mean_bps``.

    Raises:
        InputError: The trace has only rates of 0.
    """
    if not trace.mean_bps > 0:
        raise InputError("all rates of the trace are 0", valid="leave out --scale, or the trace")
    return replace(trace, bandwidth_bps=trace.bandwidth_bps * (mean_bps / trace.mean_bps))


def links_by_text(scenario: Scenario, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of links that texts such as ``west-east`` (both directions) and ``west->east`` (one) name.

    Without texts these are all links between regions.

    Raises:
        InputError: There is no such link, or without texts no link between regions.
    """
    cluster = scenario.cluster
    if not texts:
        if not cluster.wan_links:
            raise InputError("the scenario has no link between regions", where="--link", valid="name links: --link a-b")
        return tuple(link.name for link in cluster.links if link.name in cluster.wan_links)
    known: dict[str, dict[str, None]] = {}
    for link in cluster.links:
        for text in (f"{link.source}-{link.target}", f"{link.target}-{link.source}", link.name):
            known.setdefault(text, {})[link.name] = None
    return tuple(dict.fromkeys(name for text in texts for name in find_by_name(text, known, "link", where="--link")))
