"""Training of a stage's layers: forward, backward in one part or in two, the data, the update."""
