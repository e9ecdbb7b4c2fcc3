"""Figures of runs and sweeps, drawn with matplotlib."""
