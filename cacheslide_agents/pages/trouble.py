"""What the operating system refused, and what to do about it.

In: its error, or SQLite's. Out: the cause with its mend, for people.
"""

from __future__ import annotations

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What this process is short of: it says nothing about the file."""


def told(error: Exception) -> str:
    """The cause, and its mend."""
    return f"{error}; {_mend(getattr(error, 'errno', None))}"


def _mend(number: int | None) -> str:
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "leave the folder where it is while the store is open"
    if number == errno.EISDIR:
        return "move the folder of that name away"
    if number in FULL:
        return "make room on the disk"
    if number in SHORT:
        return "close files and programs, or raise their limits (ulimit -n)"
    return "see that the folder can be written and the disk has room"
