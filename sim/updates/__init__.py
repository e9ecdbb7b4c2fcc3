"""Updates between pipelines that do not sum their gradients: what each sends when, and what waits for it."""
