"""Traces made up from a few numbers; the random ones are the same for the same seed."""

from traces.generators.fixed import constant, diurnal, outage, step
from traces.generators.outage_bursts import with_outage_bursts
from traces.generators.stochastic import markov, ornstein_uhlenbeck

__all__ = ["constant", "diurnal", "markov", "ornstein_uhlenbeck", "outage", "step", "with_outage_bursts"]
