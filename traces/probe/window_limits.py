"""What held a sender up, as far as Linux knows: its buffers and the receiver's window, or the path."""

import socket
import struct
from collections.abc import Sequence

# In struct tcp_info (linux/tcp.h, since Linux 5.4): sender's segment size, congestion window in segments, and the
# window that the receiver offers.
_NUMBER = struct.Struct("=I")
_SEGMENT, _CONGESTION, _OFFERED = 16, 80, 228

# Linux lets a send buffer grow to twice the segments of the congestion window, with what keeps them: while it may grow,
# the window is less than a third of it.
_HELD_UP_SHARE = 0.5


def full_window_bytes(connections: Sequence[socket.socket]) -> float | None:
    """Return the buffer or window that holds up a connection, while congestion control would let more out; bytes.

    The least of all connections. None where the path itself holds them up, or the system does not say.
    """
    found = [_full_window_bytes(connection) for connection in connections]
    full = [each for each in found if each is not None]
    return min(full) if full and len(full) == len(found) else None


def _full_window_bytes(connection: socket.socket) -> float | None:
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _OFFERED + _NUMBER.size)
        buffer_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except OSError:
        return None
    if len(info) < _OFFERED + _NUMBER.size:
        return None
    segment_bytes, segments, offered_bytes = (
        _NUMBER.unpack_from(info, at)[0] for at in (_SEGMENT, _CONGESTION, _OFFERED)
    )
    most_bytes = segment_bytes * segments
    if offered_bytes and most_bytes >= offered_bytes:
        return float(min(offered_bytes, buffer_bytes))
    return float(buffer_bytes) if most_bytes >= _HELD_UP_SHARE * buffer_bytes else None
