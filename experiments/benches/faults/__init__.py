"""Strikes to real runs at random instants, strangers, and a busy machine; and what must hold nevertheless."""
