"""Measured runs that eth-easl/sailor publishes, and the simulator's error on them."""
