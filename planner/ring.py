"""The ring all-reduce, as each participant's list of exchanges (Patarasuk and Yuan, 2009).

n participants cut the numbers into n chunks. In n - 1 rounds every chunk travels round the ring and is summed;
in n - 1 more rounds the sums travel round. Each participant sends 2(n - 1)/n of the data.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """One participant's part of one round: send a chunk to the next one, receive one from the previous.

    Attributes:
        send: (first, end) element to send.
        receive: (first, end) element to receive.
        adds: Whether what arrives is added to what is there, or replaces it.
    """

    send: tuple[int, int]
    receive: tuple[int, int]
    adds: bool

    @property
    def send_elements(self) -> int:
        """How many elements are sent."""
        return self.send[1] - self.send[0]

    @property
    def receive_elements(self) -> int:
        """How many elements are received."""
        return self.receive[1] - self.receive[0]


def ring_exchanges(elements: int, participants: int, position: int) -> tuple[Exchange, ...]:
    """Return the 2(n - 1) exchanges of the participant at ``position``, in order."""
    bounds = [elements * part // participants for part in range(participants + 1)]

    def chunk(index: int) -> tuple[int, int]:
        index %= participants
        return bounds[index], bounds[index + 1]

    sums = (Exchange(chunk(position - turn), chunk(position - turn - 1), adds=True) for turn in range(participants - 1))
    copies = (
        Exchange(chunk(position + 1 - turn), chunk(position - turn), adds=False) for turn in range(participants - 1)
    )
    return (*sums, *copies)
