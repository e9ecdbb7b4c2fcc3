"""Benches of the executor, beside the programs of torch that users would take instead."""
