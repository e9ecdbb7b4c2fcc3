"""Baseline strategies: data parallelism and uniform or simple pipelines."""
