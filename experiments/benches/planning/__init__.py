"""Benches of planners, schedules and policies."""
