"""Benches: each measures one aspect of ropebridge and checks its figures against fixed limits, called bars."""
