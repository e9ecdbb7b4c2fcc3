"""The rate of a message as a function of its size; small messages do not reach a link's full rate."""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class SizeCurve:
    """Bandwidth as a polynomial of the message size (the form in which eth-easl/sailor publishes measured networks).

    Bandwidth in GB/s is a·x² + b·x + c with x = log2(message size in MB), limited by ``ceiling_bps``.

    Outside of the sizes that the polynomial was fitted to, two rules replace it. The rate never falls with the size:
    above the peak of the parabola (or below its trough) the rate is constant. The time, size / rate, never falls with
    the size either: messages that are smaller than the message with the shortest time take the shortest time, too.

    The coefficients a, b and c, in GB/s, are the attributes ``quadratic``, ``linear`` and ``constant``.
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
        # Below the size with the shortest time, the time is constant, so that the rate is proportional to the size.
        shrink = math.exp2(min(0.0, exponent - self._shortest))
        return shrink * min(self._polynomial_bps(inside), self.ceiling_bps)

    def _polynomial_bps(self, exponent: float) -> float:
        return 8e9 * (self.quadratic * exponent**2 + self.linear * exponent + self.constant)

    @cached_property
    def _rising(self) -> tuple[float, float]:
        """Range of x = log2(MB) in which the polynomial rises: from its trough to infinity, or up to its peak."""
        if self.quadratic == 0:
            return -math.inf, math.inf
        vertex = -self.linear / (2 * self.quadratic)
        return (vertex, math.inf) if self.quadratic > 0 else (-math.inf, vertex)

    @cached_property
    def _shortest(self) -> float:
        """The x = log2(MB) at which the time, 2^x / (a·x² + b·x + c), is shortest; minus infinity if there is none.

        The derivative of the time is zero where ln 2 · (a·x² + b·x + c) = 2a·x + b.
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
        # Two forms of one root of the quadratic equation; each avoids cancellation for its sign of ``line``.
        return (root - line) / (2 * square) if line <= 0 else -2 * rest / (line + root)
