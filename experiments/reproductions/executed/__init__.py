"""Reproductions carried out for real beside the simulator."""
