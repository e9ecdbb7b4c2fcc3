"""Benches of training in several regions, whose workers exchange only after many steps."""
