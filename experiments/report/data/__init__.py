"""The contents of pages and figures, computed from runs; nothing here draws."""
