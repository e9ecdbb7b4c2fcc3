"""The colours of all pictures."""

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
