"""Checksums of files."""

import hashlib
import os


def sha256_of(file: str | os.PathLike) -> str:
    """SHA-256 (hexadecimal) of a file, which is read in parts."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            digest.update(part)
    return digest.hexdigest()
