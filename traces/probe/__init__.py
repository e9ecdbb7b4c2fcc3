"""Measures a network path: a peer at one end sends requests to a responder at the other end, over plain sockets.

Peers are not authenticated and data is not encrypted: use a tunnel on a path that strangers can reach.
"""
