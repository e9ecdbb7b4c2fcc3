"""The reproduction of DeepCEE's claims."""
