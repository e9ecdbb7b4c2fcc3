"""Forecasts of links and step times from the steps of a run, the plans that suit them, and probes of links unseen."""
