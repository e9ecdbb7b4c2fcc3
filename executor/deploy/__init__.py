"""Bring a job to the hosts that run it. Nothing here loads torch, except a rank that torchrun starts."""
