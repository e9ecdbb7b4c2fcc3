"""How `auto` searches: skeletons by dynamic programming, candidates by the compiled evaluator, then small changes."""
