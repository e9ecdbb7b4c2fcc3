"""Benches of the simulator: its speed, and its predictions of real training."""
