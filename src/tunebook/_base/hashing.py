"""The hash of keys, code and configurations."""

from __future__ import annotations

try:
    # The same function as `hashlib.blake2b`. Importing `hashlib` loads OpenSSL, which takes 3 ms.
    from _blake2 import blake2b as blake2b  # noqa: PLC0414 - this module's only name
except ImportError:  # not CPython
    from hashlib import blake2b as blake2b  # noqa: PLC0414 - the same
