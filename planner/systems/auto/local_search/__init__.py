"""The local search of `auto`: small changes of a plan, as long as one of them helps."""
