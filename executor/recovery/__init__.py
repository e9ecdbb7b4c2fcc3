"""Copies of layers' state: backups in memory, checkpoints on disk, and migrations between devices."""
