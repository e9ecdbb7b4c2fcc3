"""HTML pages of runs and sweeps, drawn with Bokeh; each is one file that loads nothing else."""
