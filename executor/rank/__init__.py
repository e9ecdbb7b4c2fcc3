"""The process of one rank: its connection to the head, its sessions with other ranks, and its training loop."""
