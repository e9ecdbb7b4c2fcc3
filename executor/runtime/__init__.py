"""How a rank carries out its actions, gradient sums and updates."""
