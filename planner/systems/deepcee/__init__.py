"""DeepCEE/SpanTrain (arXiv 2505.15536): one pipeline across regions that adapts to the network."""
