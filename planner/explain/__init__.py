"""Why a plan is as fast as it is: loads, the bottleneck, and what would help."""
