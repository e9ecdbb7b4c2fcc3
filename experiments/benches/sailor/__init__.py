"""Reads the measurements published in github.com/eth-easl/sailor, and measures the simulator's errors on them."""
