"""Execution of a rank's program: actions, gradient sums, and updates between pipelines."""
