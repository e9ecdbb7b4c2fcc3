"""Compiled kernels: devices at work and piecewise-constant rates."""
