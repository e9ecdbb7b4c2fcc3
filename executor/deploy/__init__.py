"""Bringing a job to the hosts that shall run it; nothing here loads torch."""
