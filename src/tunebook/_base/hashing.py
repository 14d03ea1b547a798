"""Digests of what must be told apart: keys, code, configurations."""

from __future__ import annotations

try:
    # What `hashlib.blake2b` is. By way of `hashlib` it comes with OpenSSL, whose loading is 3 of the 60 ms that
    # `import tunebook` may take.
    from _blake2 import blake2b as blake2b  # noqa: PLC0414 - this module's only name
except ImportError:  # not CPython
    from hashlib import blake2b as blake2b  # noqa: PLC0414 - as above
