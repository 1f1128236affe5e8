"""English prose that ships with Python: the language reference, which `help()` shows."""

from __future__ import annotations

import hashlib
import re
from functools import cache

_SHORTEST = 150  # characters of a paragraph; shorter ones are captions


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of the reference that are prose, without code, tables and lists; each is one line of text.

    Other versions of Python have other paragraphs; `fingerprint` tells them apart.
    """
    from pydoc_data.topics import topics  # (large)

    found = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(part.split()) for part in found if part[:1].isupper() and part.rstrip().endswith("."))
    return tuple(dict.fromkeys(part for part in prose if len(part) >= _SHORTEST))


def fingerprint() -> str:
    """Twelve hexadecimal digits of the SHA-256 of all paragraphs."""
    return hashlib.sha256("\n".join(paragraphs()).encode()).hexdigest()[:12]
