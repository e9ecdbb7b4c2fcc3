"""The user's model: loaded, checked, cut into layers, and its data in order."""
