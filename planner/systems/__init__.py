"""Strategies, which make plans, and policies, which change plans during a run: published systems, baselines, `auto`."""
