"""The published systems, the baselines and `auto`: strategies that make plans and policies that change them."""
