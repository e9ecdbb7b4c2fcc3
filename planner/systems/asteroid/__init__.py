"""Asteroid (arXiv 2408.08015): hybrid pipelines on edge devices, and replay when a device is lost."""
