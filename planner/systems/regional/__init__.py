"""Strategy ``auto`` for a loss: which regions train separately as workers, by which method, and how they exchange."""
