"""Benches of the executor, beside what users would take instead."""
