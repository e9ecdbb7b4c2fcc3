"""Cannikin (arXiv 2402.05302): data parallelism with unequal batches on unlike devices."""
