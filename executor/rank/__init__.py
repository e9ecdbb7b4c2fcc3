"""One rank of a run: its process, its session with the other ranks, its training loop."""
