"""One bench a file: each measures, and says which bars its figures must meet."""
