"""Measures models on this device, and messages between ranks of two hosts."""
