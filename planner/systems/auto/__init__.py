"""The strategy and policy `auto`: a search over all that a plan can express."""
