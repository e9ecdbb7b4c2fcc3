"""Computes from runs and sweeps what pages and figures show; nothing here draws."""
