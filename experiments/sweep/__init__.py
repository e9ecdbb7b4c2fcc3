"""Sweeps: one scenario, plan and policy simulated over and over with other values, into one table."""
