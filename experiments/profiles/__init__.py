"""Profiles of models and networks: measured, imported, and written as files."""
