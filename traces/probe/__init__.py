"""Measures a network path from its two ends: a responder at one, a peer that asks it at the other; plain sockets.

Peers are not authenticated and data is not encrypted: measure a path that strangers can reach inside a tunnel.
"""
