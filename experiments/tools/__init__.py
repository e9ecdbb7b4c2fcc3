"""Writes the documentation's generated parts: reference, schemas and pictures."""
