"""Cloudless-Training (arXiv 2303.05330): a pipeline per region, rented elastically."""
