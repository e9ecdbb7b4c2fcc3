"""Traces made up from a few numbers; the random ones are the same for the same seed."""

from traces.generators.fixed import constant, diurnal, outage, step
from traces.generators.stochastic import markov, ornstein_uhlenbeck, with_outage_bursts

__all__ = ["constant", "diurnal", "markov", "ornstein_uhlenbeck", "outage", "step", "with_outage_bursts"]
