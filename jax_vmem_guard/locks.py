"""Locks that survive a fork.

A child process made by `os.fork` has only the thread that forked. A lock that another thread held then would stay taken
in the child for ever; data loaders fork while programs compile. Here the child gets fresh locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A `threading.Lock` for `with`, free again in a forked child. What it guards must be whole between statements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in tuple(_all):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
