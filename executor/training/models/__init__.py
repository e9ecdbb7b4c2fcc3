"""The user's model: loaded, checked, split into layers, and its data in order."""
