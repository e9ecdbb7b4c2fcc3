"""Pre-emption traces: the times at which a provider withdraws and returns nodes."""
