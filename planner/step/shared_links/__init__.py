"""Steps whose messages share links, in compiled code."""
