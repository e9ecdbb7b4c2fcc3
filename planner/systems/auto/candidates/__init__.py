"""Candidate plans of `auto`: pipelines by dynamic programming over device classes, or over sets of few devices."""
