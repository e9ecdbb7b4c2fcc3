"""Modules that all processes of a job share: documents, messages, clocks and failures."""
