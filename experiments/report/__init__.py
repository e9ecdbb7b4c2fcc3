"""Reports of runs and sweeps: pages, figures and traces for Perfetto."""
