"""TLS between processes that share a secret: both ends derive one key pair from it, and accept no other certificate.

Python 3.11 knows no pre-shared keys of TLS. So both ends derive the private key, of Ed25519, from the secret, and each
end presents and expects the certificate of this key alone: an end proves that it knows the secret, in TLS 1.3, before
the other one accepts or sends anything. No authority signs the certificate, and it is never renewed: a secret has the
life of one job, or of one server.
"""

import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_KEY_BYTES = 32
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ropebridge")])
# The clocks of hosts may differ, and a job ends with its secret.
_BEGIN, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)

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
    derived = HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"ropebridge private key").derive(secret)
    private = Ed25519PrivateKey.from_private_bytes(derived)
    unsigned = x509.CertificateBuilder().subject_name(_NAME).issuer_name(_NAME).public_key(private.public_key())
    unsigned = unsigned.serial_number(1).not_valid_before(_BEGIN).not_valid_after(_END)
    # Signatures of Ed25519 are not random, so that both ends make the same certificate.
    certificate = unsigned.sign(private, None)
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem = key + certificate.public_bytes(Encoding.PEM)
    return Identity(certificate.public_bytes(Encoding.DER), pem.decode())


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
