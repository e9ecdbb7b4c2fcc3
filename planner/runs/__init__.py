"""What a run leaves: its record, metrics, memory over time and gradient noise."""
