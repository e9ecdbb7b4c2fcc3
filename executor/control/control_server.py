"""The control server of a job, called the head: a thread of the launcher, to which all agents and ranks connect.

A session is a part of a run in which the same ranks train; it ends when ranks are lost or others join.

A message is a line with a JSON object; ``kind`` names its type, and with ``payload_bytes`` that many bytes follow the
line. After the handshake of TLS (executor/core/tls.py) the client sends ``hello``: an agent with its ``host``, a rank
with its ``rank`` and ``incarnation`` (the number of its process). The head sends decisions at once; no client polls for
them.

============ ======================================================================= ===================================
from → to    kind: fields                                                            sent when
============ ======================================================================= ===================================
head → agent ``welcome``: whether lost ranks are replaced; the job's documents, if   the agent has sent ``hello``
             the agent is on another host
head → agent ``start``: a rank, the incarnation of its new process                   all hosts have come; a rank is lost
head → agent ``signal``: a rank, the number of a signal                              a fault of the scenario is due
head → agent ``over``: status and reason                                             the job has ended
agent → head ``ended``: a rank, its incarnation, exit status, reason                 a rank's process has ended
agent → head ``failed``: reason, one sentence                                        the job cannot continue on the host
rank → head  ``agree``: a topic, the rank's statement on the topic                   the rank prepares for training
head → rank  ``agreed``: the topic, an error or null, the head's clock               all ranks have sent ``agree``
rank → head  ``store``: a key and a value, which the head sends to all ranks         gloo connects the ranks
rank → head  ``clock``; the answer has the same kind                                 every few seconds, from other hosts
rank → head  ``ready``                                                               the rank can join a session
head → rank  ``begin``: a `SessionSpec`                                              all ranks of the session are ready
rank → head  ``origin``: second 0 of the run                                         the ranks have agreed on second 0
rank → head  ``step``: event rows, loss, newest step with copies of its layers       the sends of a step have departed
head → rank  ``plan``: the plan of a later step                                      all ranks have published a step
head → rank  ``heard``: a step, which is kept and need not be sent again             the same
rank → head  ``trouble``                                                             a connection to a peer is lost
head → rank  ``ended``: the session is over                                          ranks are lost, or others join
rank → head  ``report``: the rank's copies of layers                                 the session of the rank has ended
rank → head  ``done``                                                               the rank has written all its results
head → rank  ``finished``                                                            all ranks are done
rank → head  ``serves``: an address                                                  a syncer listens
head → rank  ``last``: a step, before which the rank's pipeline ends                 all samples are given out
rank → head  ``last``: a device                                                      it has sent a syncer its last
head → rank  ``conclude``                                                            all pipelines have sent theirs
head → rank  ``lost``: devices of a worker, number of its session                    its session has ended, to syncers
rank → head  ``rows``: event rows                                                    a syncer has some
rank → head  ``file``: the next piece of a file; no payload at the file's end        the run has ended, on other hosts
rank → head  ``files-sent``                                                          the rank has sent all its files
============ ======================================================================= ===================================

Security: nothing is accepted or sent before the other end has proved that it knows the job's key. Afterwards no file
name comes over the network; a file has a kind of `executor.core.job.FILE_KINDS`, and belongs to the rank of its
connection. Lines have a maximal length. A connection that is not authenticated is closed after `Timeouts.proof_s`; the
oldest such connection is closed if there are more than `MAX_UNPROVED`, or if this process has no file descriptor left.
After each connection that ends without authentication the server accepts none for a moment, so that strangers cannot
take much of this process's time.
"""

import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.core.control_channel import AGENT, LINE_BYTES, RANK, Message, decode, encode, tune
from executor.core.hosts import Hosts
from executor.core.job import FILE_KINDS, JobFolder
from executor.core.timeouts import timeouts
from executor.core.tls import TlsEnd, context

# The largest number of connections that are not authenticated; one more closes the oldest of them.
MAX_UNPROVED = 64

# The largest payload in bytes; ranks send files in pieces of this size.
PAYLOAD_BYTES = 1 << 20

_RECEIVE_BYTES = 1 << 18
# Pauses of accepting: after the operating system has refused to, and after a connection without authentication.
_REFUSED_PAUSE_S = 0.1
_STRANGER_PAUSE_S = 0.01


class Peer:
    """The server's end of one connection.

    Args:
        key: The job's key; None if this process has inherited the connection, which then needs no authentication.

    Attributes:
        since_s: When the connection was accepted, by the monotonic clock.
        role: `AGENT` or `RANK`; empty before the client has said hello.
        rank: Number of the rank; -1 on the connection of an agent.
        searched: How many bytes of ``inbound`` are known to contain no end of a line.
        awaiting_payload: The message whose payload has not arrived completely; None if there is none.
        outbound: Bytes for the network.
    """

    def __init__(self, connection: socket.socket, key: bytes | None) -> None:
        self.connection = connection
        self._tls = TlsEnd(key, is_server=True) if key is not None else None
        self.since_s = time.monotonic()
        self.role = ""
        self.host = ""
        self.rank = -1
        self.incarnation = 0
        self.has_said_hello = False
        self.inbound = bytearray()
        self.searched = 0
        self.awaiting_payload: Message | None = None
        self.outbound = bytearray()

    @property
    def is_proved(self) -> bool:
        """Whether the other end has proved that it knows the job's key."""
        return self._tls is None or self._tls.is_proved

    def receive(self, received: bytes) -> None:
        """Add bytes of the network to ``inbound``; raise `ssl.SSLError` if the other end does not know the key."""
        self.inbound += received if self._tls is None else self._tls.receive(received)

    def send(self, words: bytes) -> None:
        """Add words, and the bytes of TLS that have to go before them, to ``outbound``."""
        self.outbound += words if self._tls is None else self._tls.send(words)


class ControlServer:
    """Accepts, authenticates and serves connections in a thread of its own.

    Args:
        listening: The socket at which agents and ranks connect; this object closes it.
        own_agent: A socket connected to the agent of this host by this process, so that no authentication is needed.
        job: The folder into which files from other hosts are written.
        hosts: The hosts of the job; None if this host has all ranks.

    Attributes:
        events: Queue of pairs, in order of arrival: a connection, and its message or, when the connection ends, None.
    """

    def __init__(
        self,
        listening: socket.socket,
        own_agent: socket.socket,
        key: bytes,
        job: JobFolder,
        ranks: int,
        hosts: Hosts | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[tuple[Peer, Message | None]] = queue.SimpleQueue()
        self._listening = listening
        self._key = key
        # Now, since there may be no file descriptor left when the first connection comes.
        context(key, is_server=True)
        self._job = job
        self._ranks = ranks
        # The hosts whose agents may connect: all but this host.
        self._others = frozenset(hosts.others) if hosts is not None else frozenset()
        self._silence_s = hosts.silence_s if hosts is not None else 0.0
        self._proof_s = timeouts().proof_s
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._is_closing = False
        self._accepts_from_s = 0.0
        self._dropped: list[Peer] = []
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: set[Peer] = set()
        self.own_agent = self._add(own_agent, None)
        self.own_agent.role, self.own_agent.host = AGENT, hosts.head if hosts is not None else ""
        self.own_agent.has_said_hello = True
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def send(self, peers: Peer | Iterable[Peer], kind: str, **fields: Any) -> None:
        """Send a message to one connection or to several; safe in any thread. Closed connections are skipped."""
        line = encode({"kind": kind, **fields})
        with self._lock:
            for peer in [peers] if isinstance(peers, Peer) else peers:
                if peer in self._peers:
                    # The loop is about to close a connection on which TLS has failed.
                    with suppress(ssl.SSLError):
                        peer.send(line)
        self._wake_up()

    def drop(self, peer: Peer) -> None:
        """Close a connection."""
        with self._lock:
            self._dropped.append(peer)
        self._wake_up()

    def close(self) -> None:
        """Send the queued bytes as far as the sockets accept them without waiting, and close all connections."""
        self._is_closing = True
        self._wake_up()
        self._thread.join()
        for peer in list(self._peers):
            self._close(peer)
        self._selector.close()
        for each in (self._listening, self._wake, self._woken):
            each.close()

    def _wake_up(self) -> None:
        # If the buffer is full, the loop is about to wake up anyway.
        with suppress(BlockingIOError):
            self._wake.send(b"!")

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting = [peer for peer in self._peers if peer.outbound]
            for peer in waiting:
                self._write(peer)
            if self._is_closing:
                return
            for selected, _ in self._selector.select(self._pause_s()):
                if selected.fileobj is self._listening:
                    self._accept()
                elif selected.fileobj is self._woken:
                    self._woken.recv(_RECEIVE_BYTES)
                elif (peer := selected.data) in self._peers:
                    self._read(peer)
            self._drop_late()

    def _pause_s(self) -> float | None:
        """Return the time in seconds until the next timeout; None if no timeout is pending."""
        now_s = time.monotonic()
        until_s = [peer.since_s + self._proof_s for peer in self._peers if not peer.is_proved]
        if self._accepts_from_s:
            until_s.append(self._accepts_from_s)
        return max(0.0, min(until_s) - now_s) if until_s else None

    def _add(self, connection: socket.socket, key: bytes | None) -> Peer:
        connection.setblocking(False)
        peer = Peer(connection, key)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            # Possibly no file descriptor is left: pause, so that the loop neither ends nor spins.
            self._pause_accepting(_REFUSED_PAUSE_S)
            self._drop_oldest_unproved()
            return
        with self._lock:
            self._add(connection, self._key)
        if sum(not peer.is_proved for peer in self._peers) > MAX_UNPROVED:
            self._drop_oldest_unproved()

    def _pause_accepting(self, pause_s: float) -> None:
        """Accept no connection for a time, after earlier pauses: many that end at once must not share one pause."""
        if not self._accepts_from_s:
            self._selector.unregister(self._listening)
        self._accepts_from_s = max(self._accepts_from_s, time.monotonic()) + pause_s

    def _drop_oldest_unproved(self) -> None:
        oldest = min((peer for peer in self._peers if not peer.is_proved), key=lambda peer: peer.since_s, default=None)
        if oldest is not None:
            self._close(oldest)

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        if self._accepts_from_s and now_s >= self._accepts_from_s:
            self._accepts_from_s = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ)
        with self._lock:
            dropped, self._dropped = self._dropped, []
        late = [peer for peer in self._peers if not peer.is_proved and now_s >= peer.since_s + self._proof_s]
        for peer in [*dropped, *late]:
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if not peer.is_proved:
            self._pause_accepting(_STRANGER_PAUSE_S)
        if peer.has_said_hello:
            self.events.put((peer, None))

    def _write(self, peer: Peer) -> None:
        try:
            with self._lock:
                del peer.outbound[: peer.connection.send(peer.outbound)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbound else 0)
        if self._selector.get_key(peer.connection).events != wanted:
            self._selector.modify(peer.connection, wanted, peer)

    def _read(self, peer: Peer) -> None:
        try:
            received = peer.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        try:
            peer.receive(received)
        except ssl.SSLError:
            received = b""
        if not received:
            self._close(peer)
            return
        # Bytes of the handshake.
        with self._lock:
            peer.send(b"")
        while self._take(peer):
            pass

    def _take(self, peer: Peer) -> bool:
        """Handle the next message; return whether there was a complete one and the connection stays open."""
        if peer.awaiting_payload is not None:
            size = peer.awaiting_payload["payload_bytes"]
            if len(peer.inbound) < size:
                return False
            message, peer.awaiting_payload = peer.awaiting_payload, None
            payload = bytes(peer.inbound[:size])
            del peer.inbound[:size]
            return self._handle(peer, message, payload)
        end = peer.inbound.find(b"\n", peer.searched)
        length = peer.searched = len(peer.inbound) if end < 0 else end
        if length > LINE_BYTES:
            self._close(peer)
            return False
        if end < 0:
            return False
        said = decode(peer.inbound[:end])
        del peer.inbound[: end + 1]
        peer.searched = 0
        size = said.get("payload_bytes") if said is not None else None
        if said is None or not (size is None or (type(size) is int and 0 < size <= PAYLOAD_BYTES)):
            self._close(peer)
            return False
        if size is None:
            return self._handle(peer, said, b"")
        peer.awaiting_payload = said
        return True

    def _handle(self, peer: Peer, message: Message, payload: bytes) -> bool:
        """Handle a message; return whether the connection stays open."""
        is_valid = True
        if not peer.has_said_hello:
            is_valid = peer.has_said_hello = self._identify(peer, message)
            if is_valid:
                self.events.put((peer, message))
        elif message.get("kind") == "clock":
            self.send(peer, "clock", asked=message.get("asked"), now_s=time.monotonic())
        elif message.get("kind") == "file":
            is_valid = self._write_file(peer, message, payload)
        else:
            self.events.put((peer, message))
        if not is_valid:
            self._close(peer)
        return is_valid

    def _identify(self, peer: Peer, message: Message) -> bool:
        tune(peer.connection, self._silence_s)
        if message.get("kind") != "hello":
            return False
        if "host" in message:
            peer.role, peer.host = AGENT, str(message["host"])
            return peer.host in self._others
        rank, incarnation = message.get("rank"), message.get("incarnation")
        if type(rank) is not int or not 0 <= rank < self._ranks or type(incarnation) is not int:
            return False
        peer.role, peer.rank, peer.incarnation = RANK, rank, incarnation
        return True

    def _write_file(self, peer: Peer, message: Message, payload: bytes) -> bool:
        """Append the payload to a file of a rank on another host; a message without payload completes the file."""
        name = message.get("file")
        if peer.role != RANK or not self._others or name not in FILE_KINDS:
            return False
        path: Path = self._job.of_rank(name, peer.rank)
        partial = path.with_suffix(".part")
        try:
            if payload:
                with partial.open("ab") as file:
                    file.write(payload)
            else:
                with suppress(FileNotFoundError):
                    partial.rename(path)
        except OSError as error:
            reason = f"{path} of rank {peer.rank} cannot be written: {error.strerror}"
            self.events.put((self.own_agent, {"kind": "failed", "reason": reason}))
        return True
