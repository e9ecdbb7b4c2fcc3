"""Backtests: adaptation policies simulated over recorded traces, window by window, against plans that never change."""
