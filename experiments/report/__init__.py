"""What a run or sweep looks like: pages, figures and traces for Perfetto."""
