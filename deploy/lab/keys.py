"""Keys and certificates of one lab, made by openssl; good for two days, on this machine only."""

from __future__ import annotations

import subprocess
from pathlib import Path

_DAYS = "2"


def make(folder: Path, service_address: str) -> None:
    """Make the authority, the API server's and the administrator's certificates and the key of service account tokens.

    Args:
        folder: Where they go; what is there stays.
        service_address: The cluster's own address of the API server, which its certificate names.
    """
    if (folder / "admin.crt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _openssl(
        folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS, "-subj", "/CN=lab",
        "-keyout", "ca.key", "-out", "ca.crt",
    )  # fmt: skip
    _openssl(folder, "genrsa", "-out", "sa.key", "2048")
    _openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    names = f"DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:{service_address}"
    _certificate(folder, "apiserver", "/CN=kube-apiserver", f"subjectAltName={names}")
    _certificate(folder, "admin", "/O=system:masters/CN=lab-admin", "extendedKeyUsage=clientAuth")


def _certificate(folder: Path, name: str, subject: str, extension: str) -> None:
    (folder / f"{name}.ext").write_text(extension + "\n")
    _openssl(
        folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", subject,
        "-keyout", f"{name}.key", "-out", f"{name}.csr",
    )  # fmt: skip
    _openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
        "-days", _DAYS, "-extfile", f"{name}.ext", "-out", f"{name}.crt",
    )  # fmt: skip


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
