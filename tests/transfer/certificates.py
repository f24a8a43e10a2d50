"""Certificates for tests: generated each time, valid for an hour."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mooncake_kernels.transfer import Tls

HOUR = datetime.timedelta(hours=1)


def _write(path: Path, *certificates: x509.Certificate) -> Path:
    pem = serialization.Encoding.PEM
    path.write_bytes(b"".join(certificate.public_bytes(pem) for certificate in certificates))
    return path


@dataclass
class Authority:
    """A CA, or an intermediate one."""

    folder: Path
    root: Path  # the certificate at the top
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    chain: tuple[x509.Certificate, ...] = ()  # those between it and the top, itself included

    def issue(
        self, name: str, *, host: str | None = "127.0.0.1", starts=-HOUR, ends=HOUR, password=None
    ) -> dict[str, Path]:
        """An engine's certificate and key, as files: ``Tls(**authority.issue("node"))``."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, self.certificate.subject, key, starts, ends)
        if host:
            try:
                names = [x509.IPAddress(ipaddress.ip_address(host))]
            except ValueError:
                names = [x509.DNSName(host)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        key_file = self.folder / f"{name}.key"
        encryption = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        pkcs8 = serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, encryption))
        return {
            "certificate": _write(self.folder / f"{name}.pem", certificate, *self.chain),
            "key": key_file,
        }

    def tls(self, name: str, **options) -> Tls:
        """The settings of an engine that trusts this authority."""
        return Tls(**self.issue(name, **options), ca=self.root)

    def intermediate(self, name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, self.certificate.subject, key, -HOUR, HOUR)
        certificate = _as_ca(builder).sign(self.key, hashes.SHA256())
        return Authority(self.folder, self.root, certificate, key, (certificate, *self.chain))


def authority(folder: Path, name: str = "ca") -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = _as_ca(_builder(name, subject, key, -HOUR, HOUR)).sign(key, hashes.SHA256())
    return Authority(folder, _write(folder / f"{name}.pem", certificate), certificate, key)


def _builder(name, issuer, key, starts, ends) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts)
        .not_valid_after(now + ends)
    )


def _as_ca(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
