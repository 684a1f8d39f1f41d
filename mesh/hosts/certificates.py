"""TLS certificates of a run's hosts, one per process, signed by the run's own authority.

Both ends of a connection present one and refuse every other authority, so without `ca.key` no
worker is reachable.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from composer_mesh.mesh.open_folder import write_whole

Key: TypeAlias = ec.EllipticCurvePrivateKey

PRIVATE = 0o600
"""Mode of a file that only its owner can read."""

CA, CA_KEY = "ca.pem", "ca.key"
CERT, KEY = "host.pem", "host.key"
LIFE = timedelta(days=5 * 365)
CLOCKS = timedelta(hours=1)  # allowed clock difference between hosts
ENDS = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class BadAuthority(RuntimeError):
    """A folder has no usable certificate authority: which file, why, and the repair."""


def make_authority(folder: Path) -> None:
    """Create a certificate authority in a folder atomically, unless it has one.

    Only its owner can read the folder. Raises `BadAuthority` if it is incomplete.
    """
    if _is_whole(folder):
        return
    try:
        _make(folder)
    except OSError as error:
        if not _is_whole(folder):  # else another process has created it
            raise BadAuthority(
                f"{folder} cannot be made ({error.strerror}): correct its permissions, or name a "
                "new folder (cluster.authority)"
            ) from None


def new_authority() -> dict[str, bytes]:
    """Return a new certificate authority as file contents, for storage outside of a folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    return {CA_KEY: _key_text(key), CA: _text(_authority(key))}


def tls_environment(authority: Path, own: Path, hosts: Sequence[str]) -> dict[str, str]:
    """Create a key and a certificate for these addresses; return Monarch's environment for them.

    Creates the folder `own` for them. Clients must connect by one of `hosts`, IP addresses or DNS
    names. Raises `BadAuthority`.
    """
    if not hosts:
        raise ValueError("hosts is empty: name at least one address that others call this host")
    ca, ca_key = _load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    own.chmod(0o700)
    write_whole(own / KEY, _key_text(key), PRIVATE)
    write_whole(own / CERT, _text(_certificate(key, hosts, ca, ca_key)), PRIVATE)
    return {
        "HYPERACTOR_TLS_CERT": str(own / CERT),
        "HYPERACTOR_TLS_KEY": str(own / KEY),
        "HYPERACTOR_TLS_CA": str(authority / CA),
    }


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name, data in new_authority().items():
            write_whole(made / name, data, PRIVATE)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        # Listed once, because another process may rename the complete folder to here at any time.
        there = [path.name for path in folder.iterdir() if path.name in (CA, CA_KEY)]
    except FileNotFoundError:
        return False
    if len(there) == 1:
        missing = CA if there == [CA_KEY] else CA_KEY
        raise BadAuthority(
            f"{folder} has {there[0]} but not {missing}: put {missing} back, or remove the folder "
            "and start every host again, so that all trust a new authority"
        )
    return bool(there)


def _load(folder: Path) -> tuple[x509.Certificate, Key]:
    """Load an authority that can sign, and check it."""
    pem, key_pem = _read(folder / CA), _read(folder / CA_KEY)
    mode = (folder / CA_KEY).stat().st_mode & 0o777
    if mode & 0o007:
        raise BadAuthority(
            f"{folder / CA_KEY} has mode {mode:04o}, and whoever reads it can run code on every "
            f"host: chmod 600 {folder / CA_KEY}, or keep it on a file system with modes "
            "(cluster.authority)"
        )
    try:
        ca = x509.load_pem_x509_certificate(pem)
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as error:
        raise BadAuthority(f"{folder} has no readable {CA} and {CA_KEY}: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise BadAuthority(
            f"{folder / CA_KEY} is not the key of {folder / CA}: put the two of one authority "
            "there, or remove both and start every host again"
        )
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise BadAuthority(
            f"{folder / CA} ended on {ca.not_valid_after_utc:%Y-%m-%d}: remove {folder} and start "
            "every host again, so that all trust a new authority"
        )
    return ca, key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadAuthority(
            f"{path} cannot be read ({error.strerror}): name the folder of the run's certificate "
            f"authority, which has {CA} and {CA_KEY}; it must be there on every host"
        ) from None


def _authority(key: Key) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "composer-mesh run")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    return (
        _builder(name, name, key, datetime.now(UTC) + LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: Key, hosts: Sequence[str], ca: x509.Certificate, ca_key: Key
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "composer-mesh host")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    names = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)])
    return (
        _builder(name, ca.subject, key, ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(ENDS), critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, until: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - CLOCKS)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(**on: bool) -> x509.KeyUsage:
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: on.get(name, False) for name in names.split()})


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_text(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
