"""The scheduling problem and the compiled algorithms that solve it."""
