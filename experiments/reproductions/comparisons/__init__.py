"""Fair comparisons of strategies: each one chooses its own knobs, and one judge scores all plans."""
