"""Benches: each file measures one aspect of ropebridge and holds its figures to fixed limits ("bars")."""
