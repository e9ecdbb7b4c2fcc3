"""What a person runs: the command, ready scenarios, comparison, reports, benchmarks."""
