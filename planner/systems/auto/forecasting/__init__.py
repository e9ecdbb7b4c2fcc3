"""Forecasts of links from what steps have shown."""
