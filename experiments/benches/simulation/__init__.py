"""Benches of the simulator: its speed, and its error against real runs."""
