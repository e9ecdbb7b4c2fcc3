"""Events: one row for each thing that happened in a run, in memory and on disk."""
