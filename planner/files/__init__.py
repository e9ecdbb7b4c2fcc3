"""Scenarios and plans as files.

Every reader of this package raises an InputError for the first mistake, with file, line, key and what would be valid.
"""
