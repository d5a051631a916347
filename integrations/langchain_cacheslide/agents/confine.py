"""Starts one command under limits: `python confine.py LIMITS PROGRAM ARGUMENT...`.

In: limits as JSON, a program. Out: the same process, now that program, which cannot lift the
limits. Standard library only: this file is run by itself, before every command of `Shell`.

Writing outside one folder is refused by Landlock (in full since Linux 6.2), without privileges:
https://docs.kernel.org/userspace-api/landlock.html. It also refuses mounts, and outlives `exec`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE = 1 << 1
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))  # remove and make entries of every kind
TRUNCATES = 3
"""The first Landlock ABI (Linux 6.2) that also refuses `truncate` of a file outside."""
_SINCE = {2: 1 << 13, TRUNCATES: 1 << 14}  # move between folders, truncate
_DEVICES = ("/dev/null", "/dev/tty", "/dev/zero")


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _VERSION))


def write_only_below(folder: str) -> None:
    """From now on this process and its children change files nowhere else. Raises `OSError`."""
    version = landlock_version()
    access = _WRITE_FILE | _CHANGE_FOLDERS
    access |= sum(bit for since, bit in _SINCE.items() if version >= since)
    attributes = _Ruleset(access)
    size = ctypes.sizeof(attributes)
    ruleset = _checked(_syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0))
    _allow(ruleset, folder, access)
    for device in filter(os.path.exists, _DEVICES):
        _allow(ruleset, device, _WRITE_FILE)
    _checked(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def main(arguments: Sequence[str]) -> None:
    """`LIMITS` is an object of resource names with numbers, and of `folder` where writes stay."""
    limits = json.loads(arguments[0])
    folder = limits.pop("folder", None)
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    if folder is not None:
        write_only_below(folder)
    os.execvp(arguments[1], list(arguments[1:]))


def _allow(ruleset: int, path: str, access: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(access, parent)
    _checked(_syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
    os.close(parent)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    whole = (ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments)
    return int(_libc().syscall(ctypes.c_long(number), *whole))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"this kernel refuses to confine a process: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
