"""Model profiles that others measured, one module per file format."""
