"""What pages and figures show, computed from runs; nothing here draws."""
