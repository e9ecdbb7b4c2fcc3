"""The reproduction of Cannikin's claims."""
