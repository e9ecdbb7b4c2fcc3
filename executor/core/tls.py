"""TLS between processes that share a secret: both ends derive one key pair from it, and accept no other certificate.

Python 3.11 knows no pre-shared keys of TLS. So the private key, a number on the curve P-256, is derived from the
secret, and each end presents and expects the certificate of this key alone: an end proves that it knows the secret, in
TLS 1.3, before the other one accepts or sends anything. No authority signs the certificate, and it is never renewed: a
secret has the life of one job, or of one server. The arithmetic here makes the key pair; all else is OpenSSL's.
"""

import base64
import hashlib
import hmac
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from functools import lru_cache

# The curve P-256 (SEC 2, section 2.4.2): the field's prime, the order of the base point, and this point.
_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_NUMBER_BYTES = 32

# DER: tags, and the identifiers of P-256, of keys on curves, of ECDSA with SHA-256, and of the name "ropebridge".
_INTEGER, _BITS, _OCTETS, _SEQUENCE = 0x02, 0x03, 0x04, 0x30
_CURVE = bytes.fromhex("06082a8648ce3d030107")
_KEY_TYPE = bytes.fromhex("301306072a8648ce3d0201") + _CURVE
_ECDSA = bytes.fromhex("300a06082a8648ce3d040302")
_NAME = bytes.fromhex("3015311330110603550403 0c0a") + b"ropebridge"
# 1970 to 9999: the clocks of hosts may differ, and a job ends with its secret.
_VALIDITY = bytes.fromhex("3020 170d") + b"700101000000Z" + bytes.fromhex("180f") + b"99991231235959Z"

_READ_BYTES = 1 << 16

# The largest number of bytes that an end takes before the other one has proved itself; a handshake needs some 2,500.
UNPROVED_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Identity:
    """What both ends of a connection derive from their secret.

    Attributes:
        certificate: The certificate in DER.
        pem: Private key and certificate as text, in the form that OpenSSL reads.
    """

    certificate: bytes
    pem: str = field(repr=False)


@lru_cache(maxsize=8)
def identity(secret: bytes) -> Identity:
    """Return the key pair and certificate of a secret, which must be hard to guess: any end can try guesses at it."""
    private, nonce = (_number(secret, purpose) for purpose in (b"private key", b"nonce of the only signature"))
    x, y = _multiple(private)
    point = _bits(b"\x04" + _bytes(x) + _bytes(y))
    version, serial = _der(0xA0, _integer(2)), _integer(1)
    signed = _der(_SEQUENCE, version, serial, _ECDSA, _NAME, _VALIDITY, _NAME, _der(_SEQUENCE, _KEY_TYPE, point))
    digest = int.from_bytes(hashlib.sha256(signed).digest())
    first = _multiple(nonce)[0] % _ORDER
    second = pow(nonce, -1, _ORDER) * (digest + first * private) % _ORDER
    signature = _bits(_der(_SEQUENCE, _integer(first), _integer(second)))
    certificate = _der(_SEQUENCE, signed, _ECDSA, signature)
    key = _der(_SEQUENCE, _integer(1), _der(_OCTETS, _bytes(private)), _der(0xA0, _CURVE), _der(0xA1, point))
    return Identity(certificate, _pem("EC PRIVATE KEY", key) + _pem("CERTIFICATE", certificate))


def _number(secret: bytes, purpose: bytes) -> int:
    """Return a number from 1 to the order less 1 that nobody can guess without the secret."""
    wide = hmac.new(secret, b"ropebridge " + purpose, "sha512").digest()
    return 1 + int.from_bytes(wide) % (_ORDER - 1)


def _multiple(factor: int) -> tuple[int, int]:
    """Return a multiple of the base point, by doubling and adding in Jacobian coordinates (x/z², y/z³)."""
    x, y, z = *_BASE, 1
    # The first digit of `factor` is a one; then neither sum below is of equal points, since `factor` < `_ORDER`.
    for digit in f"{factor:b}"[1:]:
        square = y * y % _PRIME
        product, slope = 4 * x * square % _PRIME, 3 * (x - z * z) * (x + z * z) % _PRIME
        z = 2 * y * z % _PRIME
        x = (slope * slope - 2 * product) % _PRIME
        y = (slope * (product - x) - 8 * square * square) % _PRIME
        if digit == "1":
            across, up = (_BASE[0] * z * z - x) % _PRIME, (_BASE[1] * z**3 - y) % _PRIME
            cube, product = across**3 % _PRIME, x * across * across % _PRIME
            z = z * across % _PRIME
            x = (up * up - cube - 2 * product) % _PRIME
            y = (up * (product - x) - y * cube) % _PRIME
    inverse = pow(z, -1, _PRIME)
    return x * inverse**2 % _PRIME, y * inverse**3 % _PRIME


def _bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES)


def _der(tag: int, *parts: bytes) -> bytes:
    """Return an element of DER with the content ``parts``, of at most 65,535 bytes."""
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    digits = size.to_bytes(1 if size <= 0xFF else 2)
    return bytes((tag, 0x80 + len(digits))) + digits + content


def _integer(number: int) -> bytes:
    # One bit more than the number has, for its sign.
    return _der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1))


def _bits(content: bytes) -> bytes:
    return _der(_BITS, b"\x00", content)


def _pem(kind: str, content: bytes) -> str:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(content).decode()}-----END {kind}-----\n"


@lru_cache(maxsize=8)
def context(secret: bytes, *, is_server: bool) -> ssl.SSLContext:
    """Return the settings of TLS for an end that knows a secret, and accepts only others that know it."""
    own = identity(secret)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate stands for the secret, not for a host.
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=own.certificate)
    if is_server:
        # Nobody resumes a connection.
        made.num_tickets = 0
    # Python reads keys from files only; this one can be read by its owner alone.
    with tempfile.NamedTemporaryFile("w", prefix="ropebridge-", suffix=".pem") as file:
        file.write(own.pem)
        file.flush()
        made.load_cert_chain(file.name)
    return made


class TlsEnd:
    """One end of a TLS connection, without its socket: bytes of the network go in and come out. Safe in any thread.

    Attributes:
        is_proved: Whether the other end has proved that it knows the secret.
    """

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self._expected = identity(secret).certificate
        self._from_network, self._to_network = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context(secret, is_server=is_server).wrap_bio(self._from_network, self._to_network, is_server)
        # OpenSSL's connections must not be used by two threads at a time.
        self._lock = threading.Lock()
        self._unproved_bytes = 0
        self.is_proved = False

    def receive(self, received: bytes) -> bytes:
        """Take bytes from the network; return what the other end has said, nothing before it has proved itself.

        Afterwards `take` may have bytes for the network.

        Raises:
            ssl.SSLError: The other end does not know the secret, speaks no TLS, or somebody has changed its bytes.
        """
        said = bytearray()
        with self._lock:
            self._from_network.write(received)
            try:
                if not self.is_proved:
                    self._shake_hands(len(received))
                while piece := self._tls.read(_READ_BYTES):
                    said += piece
            except ssl.SSLWantReadError:
                pass
        return bytes(said)

    def _shake_hands(self, received: int) -> None:
        self._unproved_bytes += received
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._unproved_bytes > UNPROVED_BYTES:
                raise ssl.SSLError(f"no handshake has {self._unproved_bytes} bytes") from None
            raise
        if self._tls.getpeercert(binary_form=True) != self._expected:
            raise ssl.SSLError("the other end has another certificate")
        self.is_proved = True

    def send(self, words: bytes) -> bytes:
        """Return the bytes for the network that carry ``words`` to the other end, after those that `take` would have.

        The results must go to the network in the order of the calls.
        """
        with self._lock:
            if words:
                self._tls.write(words)
            return self._to_network.read()

    def take(self) -> bytes:
        """Return the bytes of TLS itself that wait for the network, such as those of the handshake."""
        return self.send(b"")

    def begin(self) -> bytes:
        """Return the first bytes of the end that connects."""
        self.receive(b"")
        return self.take()
