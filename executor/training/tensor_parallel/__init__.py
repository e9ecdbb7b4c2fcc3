"""Layers that are cut over the devices of a tensor-parallel group."""
