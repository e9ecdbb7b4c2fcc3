"""Comparisons of the published systems in real runs and in the simulator."""
