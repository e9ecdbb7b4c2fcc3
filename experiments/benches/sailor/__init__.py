"""The measured runs published in eth-easl/sailor, and the simulator's error on them."""
