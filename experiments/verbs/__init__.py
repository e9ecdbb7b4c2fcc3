"""The verbs of the command as plain functions."""
