"""What a stage, a transfer and a gradient sum cost in seconds and bytes."""
