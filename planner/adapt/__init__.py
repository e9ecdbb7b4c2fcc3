"""Adaptation: what a policy observes and decides, and which state moves between two plans."""
