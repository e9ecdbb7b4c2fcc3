"""The rate that a message reaches by its size; small messages do not reach a link's full rate."""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class SizeCurve:
    """Bandwidth as a polynomial of the message size (the form in which eth-easl/sailor publishes measured networks).

    Bandwidth in GB/s is a·x² + b·x + c with x = log2(message size in MB), and never above the ceiling.

    Outside of the sizes that the polynomial was fitted to, two facts about networks hold instead.
    A larger message never gets a lower rate: past a peak the rate stays, as it does below a trough. And a smaller
    message never takes longer: below the size for which the polynomial's time is shortest, messages take that time.

    Attributes:
        quadratic: Coefficient a of the polynomial, GB/s.
        linear: Coefficient b of the polynomial, GB/s.
        constant: Coefficient c, the bandwidth of a message of 1 MB, GB/s.
        ceiling_bps: Highest rate, bits per second.
    """

    quadratic: float
    linear: float
    constant: float
    ceiling_bps: float

    def rate_bps(self, size_bytes: float) -> float:
        """Return bits per second for a message of ``size_bytes``, which is above zero."""
        exponent = math.log2(size_bytes / 1e6)
        trough, peak = self._rising
        inside = min(max(exponent, trough, self._shortest), peak)
        # Below the shortest time the time stays, so the rate falls with the size.
        shrink = math.exp2(min(0.0, exponent - self._shortest))
        return shrink * min(self._polynomial_bps(inside), self.ceiling_bps)

    def _polynomial_bps(self, exponent: float) -> float:
        return 8e9 * (self.quadratic * exponent**2 + self.linear * exponent + self.constant)

    @cached_property
    def _rising(self) -> tuple[float, float]:
        """Exponents between which the polynomial rises: from its trough on, or up to its peak."""
        if self.quadratic == 0:
            return -math.inf, math.inf
        vertex = -self.linear / (2 * self.quadratic)
        return (vertex, math.inf) if self.quadratic > 0 else (-math.inf, vertex)

    @cached_property
    def _shortest(self) -> float:
        """Exponent at which the time, 2^x / (a·x² + b·x + c), is shortest; to the left it grows without bound.

        Its derivative is zero where ln 2 · (a·x² + b·x + c) = 2a·x + b; minus infinity if that is nowhere.
        """
        square = math.log(2) * self.quadratic
        line = math.log(2) * self.linear - 2 * self.quadratic
        rest = math.log(2) * self.constant - self.linear
        if square == 0:
            return -rest / line if line > 0 else -math.inf
        discriminant = line**2 - 4 * square * rest
        if discriminant < 0:
            return -math.inf
        root = math.sqrt(discriminant)
        # Both forms are the same number; where the curve is nearly a line the first suffers cancellation.
        return (root - line) / (2 * square) if line <= 0 else -2 * rest / (line + root)
