"""Cannikin (arXiv 2402.05302): data parallelism with local batches of unequal size on devices of unequal speed."""
