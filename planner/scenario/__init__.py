"""What is trained and where: cluster, model profile, training, effects and faults."""
