"""The reproduction of Asteroid's claims."""
