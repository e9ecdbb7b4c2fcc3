"""Pre-emption traces: which nodes a provider takes back and returns, over time."""
