"""TLS of direct connections: a throw-away certificate for each process, which the other end knows by its digest.

The ends have authenticated each other before, over libp2p's streams: these carry the digest of the certificate one way
and a secret token the other. So no name, no date and no authority is checked; the digest is.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll")])
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)  # not checked


def server_side() -> tuple[ssl.SSLContext, str]:
    """TLS 1.3 with a new key that never touches a disk, and the digest that the other end must see."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(_NAME, _NAME, key.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
    certificate = builder.sign(key, SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing is resumed
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    memory = os.memfd_create("atoll-direct")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(private + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context, hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def client_side() -> ssl.SSLContext:
    """TLS 1.3 without a certificate check: call `shows` before the first byte."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # by an authority; the digest names the one certificate
    return context


def shows(connection: Any, fingerprint: str) -> bool:
    """Whether the other end of this transport has shown the certificate with this digest."""
    shown = connection.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return shown is not None and hmac.compare_digest(hashlib.sha256(shown).hexdigest(), fingerprint)
