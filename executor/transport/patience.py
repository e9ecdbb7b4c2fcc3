"""How long a rank waits for a message."""

from datetime import timedelta

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
RECV_TIMEOUT = timedelta(minutes=30)
