"""What one participant of a collective operation sends and receives in one round."""

from dataclasses import dataclass

# The part of one that sends nothing, or receives nothing.
NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One participant's part of one round: hand over a part as it is now, then wait for another part.

    Rounds of one participant rise. A message has the same round at its sender and at its receiver, and both know
    its size.

    Attributes:
        round: Counts from 0; a participant may sit rounds out, and has one exchange in a round at most.
        send_to: Position of the receiver; None if nothing is sent.
        send: (first, end) element to send.
        receive_from: Position of the sender; None if nothing is received.
        receive: (first, end) element to receive.
        adds: Whether what arrives is added to what is there, or replaces it.
    """

    round: int
    send_to: int | None
    send: tuple[int, int]
    receive_from: int | None
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
