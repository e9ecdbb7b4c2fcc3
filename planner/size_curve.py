"""The rate that a message of a size reaches: small ones never fill a link."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """Bandwidth as a polynomial of the message size (the form in which eth-easl/sailor publishes measured networks).

    Bandwidth in GB/s is a·x² + b·x + c with x = log2(message size in MB), and never above the ceiling.

    Attributes:
        quadratic: a.
        linear: b.
        constant: c, the bandwidth of a message of 1 MB, GB/s.
        ceiling_bps: Bits per second.
    """

    quadratic: float
    linear: float
    constant: float
    ceiling_bps: float

    def rate_bps(self, size_bytes: float) -> float:
        """Return bits per second for a message of ``size_bytes``, above zero."""
        exponent = math.log2(max(size_bytes, 1.0) / 1e6)
        polynomial_bps = 8e9 * (self.quadratic * exponent**2 + self.linear * exponent + self.constant)
        return min(max(polynomial_bps, 8e3), self.ceiling_bps)
