"""Measures a network path from its two ends: a responder at one, a peer that asks it at the other; plain sockets.

Nobody is authenticated and nothing is encrypted: a path that others reach is measured inside of a tunnel.
"""
