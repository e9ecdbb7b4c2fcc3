"""The reproduction of Cloudless-Training's claims."""
