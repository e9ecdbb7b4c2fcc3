"""Generators of synthetic traces; random generators give the same trace for the same seed."""

from traces.generators.fixed import constant, diurnal, outage, step
from traces.generators.stochastic import markov, ornstein_uhlenbeck, with_outage_bursts

__all__ = ["constant", "diurnal", "markov", "ornstein_uhlenbeck", "outage", "step", "with_outage_bursts"]
