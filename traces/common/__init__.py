"""Modules that all packages use: errors, lookup of names, units, text and atomic files."""
