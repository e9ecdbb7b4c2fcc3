"""Runs as one page that opens from a disk: what is computed for it, and how it is drawn with Bokeh."""
