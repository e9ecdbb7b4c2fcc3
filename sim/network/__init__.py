"""The simulated network: connections, TCP windows and shared links."""
