"""State that survives the loss of ranks: backups, checkpoints and migrations."""
