"""The command `ropebridge` and what stands behind it: ready scenarios, comparison, reports, sweeps, benchmarks."""
