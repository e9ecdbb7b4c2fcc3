"""The plan: pipelines, stages, replicas, microbatches, and the actions that they consist of."""
