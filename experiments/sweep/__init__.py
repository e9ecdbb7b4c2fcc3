"""Sweeps: a scenario, plan and policy simulated for many values of parameters, with one table of results."""
