"""Costs of stages, transfers and sums of gradients, in seconds and bytes."""
