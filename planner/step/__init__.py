"""One training step of a plan as a graph in arrays: built, compiled and evaluated."""
