"""Two ends of TLS that know one secret understand each other; with any other secret, or a changed byte, none speaks."""

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.tls import UNPROVED_BYTES, TlsEnd, context, identity

# OpenSSL's X509_V_FLAG_CHECK_SS_SIGNATURE, which Python does not name: verify the signature of the root too.
CHECK_ROOT = 0x4000

SECRET = b"a secret of these tests, 32 bytes"
WORDS = b"the words of the client\n"
secrets = st.binary(min_size=1, max_size=64)


def ends(client: bytes, server: bytes) -> tuple[TlsEnd, TlsEnd]:
    return TlsEnd(client, is_server=False), TlsEnd(server, is_server=True)


def shake_hands(client: TlsEnd, server: TlsEnd) -> None:
    server.receive(client.begin())
    client.receive(server.take())
    server.receive(client.take())


@given(secrets, st.lists(st.binary(max_size=20_000), max_size=4))
def test_what_one_end_says_the_other_one_hears(secret: bytes, words: list[bytes]) -> None:
    client, server = ends(secret, secret)
    shake_hands(client, server)
    assert client.is_proved
    assert server.is_proved
    for speaker, listener in ((client, server), (server, client)):
        sent = b"".join(map(speaker.send, words))
        assert listener.receive(sent) == b"".join(words)
        assert all(len(each) < 8 or each not in sent for each in words)


@given(secrets, secrets)
def test_secrets_have_identities_of_their_own(one: bytes, other: bytes) -> None:
    assert (identity(one) == identity(other)) == (one == other)
    assert identity(one).pem not in repr(identity(one))


@given(secrets)
def test_the_certificate_is_signed_with_its_own_key(secret: bytes) -> None:
    for is_server in (False, True):
        settings_of_tls = context(secret, is_server=is_server)
        settings_of_tls.verify_flags |= CHECK_ROOT
    shake_hands(*ends(secret, secret))


@pytest.mark.parametrize(("client_key", "server_key"), [(SECRET, b"other"), (b"other", SECRET)])
def test_another_secret_is_found_by_the_end_that_connects_before_it_has_proved_anything(
    client_key: bytes, server_key: bytes
) -> None:
    client, server = ends(client_key, server_key)
    server.receive(client.begin())
    with pytest.raises(ssl.SSLError):
        client.receive(server.take())
    # All that it still says is that it refuses.
    with pytest.raises(ssl.SSLError):
        server.receive(client.take())
    assert not client.is_proved
    assert not server.is_proved


def test_an_end_without_the_certificate_is_refused() -> None:
    server = TlsEnd(SECRET, is_server=True)
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    stranger = anybody.wrap_bio(coming, going)
    with pytest.raises(ssl.SSLWantReadError):
        stranger.do_handshake()
    server.receive(going.read())
    coming.write(server.take())
    # The end that connects believes in TLS 1.3 that the handshake is done.
    stranger.do_handshake()
    stranger.write(b'{"kind":"hello"}\n')
    with pytest.raises(ssl.SSLError):
        server.receive(going.read())
    assert not server.is_proved


def recorded() -> tuple[list[bytes], list[bytes]]:
    """What client and server send in a handshake, and words of the client afterwards."""
    client, server = ends(SECRET, SECRET)
    first = client.begin()
    server.receive(first)
    answer = server.take()
    client.receive(answer)
    return [first, client.send(WORDS)], [answer]


def test_what_was_recorded_proves_nothing() -> None:
    said, answered = recorded()
    server = TlsEnd(SECRET, is_server=True)
    server.receive(said[0])
    with pytest.raises(ssl.SSLError):
        server.receive(said[1])
    client = TlsEnd(SECRET, is_server=False)
    client.begin()
    with pytest.raises(ssl.SSLError):
        client.receive(answered[0])
    assert not server.is_proved
    assert not client.is_proved


def test_an_end_does_not_accept_its_own_words() -> None:
    """Both have the same certificate."""
    client = TlsEnd(SECRET, is_server=False)
    with pytest.raises(ssl.SSLError):
        client.receive(client.begin())
    server, another = TlsEnd(SECRET, is_server=True), TlsEnd(SECRET, is_server=True)
    server.receive(TlsEnd(SECRET, is_server=False).begin())
    with pytest.raises(ssl.SSLError):
        another.receive(server.take())


@given(st.integers(0, 2), st.integers(0, 1 << 16), st.integers(0, 7))
def test_a_changed_byte_silences_the_connection(changed: int, place: int, bit: int) -> None:
    client, server = ends(SECRET, SECRET)
    heard = b""
    flights = [client.begin, server.take, lambda: client.send(WORDS)]
    listeners = [server, client, server]
    try:
        for number, (flight, listener) in enumerate(zip(flights, listeners, strict=True)):
            sent = bytearray(flight())
            if number == changed:
                # The lengths of signatures vary.
                sent[place % len(sent)] ^= 1 << bit
            heard += listener.receive(bytes(sent))
    except ssl.SSLError:
        assert heard == b""
        return
    # A changed length has the end wait for bytes that never come; the version in a record's header means nothing.
    assert heard in (b"", WORDS)


@given(st.booleans(), st.binary(min_size=1, max_size=2 * UNPROVED_BYTES))
def test_garbage_is_refused_or_waited_for_within_a_limit(is_server: bool, garbage: bytes) -> None:
    end = TlsEnd(SECRET, is_server=is_server)
    try:
        assert end.receive(garbage) == b""
        assert len(garbage) <= UNPROVED_BYTES
    except ssl.SSLError:
        pass
    assert not end.is_proved


def test_a_handshake_without_end_has_an_end() -> None:
    server = TlsEnd(SECRET, is_server=True)
    # A ClientHello that announces 100,000 bytes, in records of 1,000.
    hello = b"\x01" + (100_000).to_bytes(3) + b"\x03\x03" + bytes(200_000)
    taken = 0
    with suppress(ssl.SSLError):
        for start in range(0, 100_000, 1000):
            server.receive(b"\x16\x03\x01" + (1000).to_bytes(2) + hello[start : start + 1000])
            taken += 1000
    assert taken <= UNPROVED_BYTES
    assert not server.is_proved
