"""Benches of the executor, compared with the programs of torch that do the same."""
