"""What every package needs: errors, names, units, text and atomic files."""
