"""Local search: changes of a plan that may make its step shorter."""
