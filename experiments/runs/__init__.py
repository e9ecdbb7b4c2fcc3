"""Shared by all verbs: run folders, scenarios by name, console and progress."""
