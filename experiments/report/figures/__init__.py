"""Pictures of runs. Modules here that draw load matplotlib; nothing else in this package does."""
