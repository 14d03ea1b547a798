"""Records on their way to a shared book and back: signed if there is a key, and then believed only if signed right.

The bytes are those of the record (see `_record`), and with a key one line more, `hmac-sha256 <64 hex digits>`. Who has
no key reads signed records too: a signature keeps those out who do not know the key, not those who do not ask for it.
"""

from __future__ import annotations

import hmac
import re
from typing import Final

from tunebook._base.errors import CodecError
from tunebook._base.record_format import Record

# What is signed begins with this, so that nothing signed with the same key for another purpose passes for a record.
_PURPOSE: Final = b"tunebook record 1\n"
_SEAL: Final = re.compile(rb"hmac-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES: Final = 77


class NotSigned(CodecError):  # noqa: N818 - named after what is the matter, as in `_errors`
    """A record that may be whole, but is not signed with our key: another machine may well be able to use it."""


def sealed(record: Record, key: bytes | None) -> bytes:
    """Return the bytes that go to a shared book."""
    data = record.to_bytes()
    return data if key is None else b"%shmac-sha256 %s\n" % (data, _digest(data, key))


def unsealed(content: bytes, key: bytes | None) -> Record:
    """Return the record in what came from a shared book; `CodecError` if it is damaged, `NotSigned` if not believed."""
    seal = _SEAL.fullmatch(content[-_SEAL_BYTES:])
    data = content if seal is None else content[:-_SEAL_BYTES]
    if key is not None and (seal is None or not hmac.compare_digest(seal[1], _digest(data, key))):
        raise NotSigned("it is not signed at all" if seal is None else "it is signed with another key, or was altered")
    return Record.from_bytes(data)


def _digest(data: bytes, key: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + data, "sha256").hexdigest().encode("ascii")
