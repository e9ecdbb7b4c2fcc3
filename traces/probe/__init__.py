"""Measures a network path by plain sockets between a responder at one end and a peer at the other, which asks.

Peers are not authenticated and data is not encrypted: use a tunnel on a path that strangers can reach.
"""
