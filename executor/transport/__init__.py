"""Messages between ranks: rendezvous, connections, receives, tags and wire formats."""
