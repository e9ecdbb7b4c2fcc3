"""Compares simulated with real runs: cases, three real runs of each, and bars on the errors of the simulation."""
