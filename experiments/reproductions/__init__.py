"""Reproductions of the published systems' headline claims, a folder for each system."""
