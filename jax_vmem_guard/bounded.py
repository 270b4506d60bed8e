"""Runs a child process that may abort, eat the memory or never end, and says which of these happened."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Bounds:
    """What a child may take.

    Attributes:
      seconds: from each event to the next.
      memory_bytes: resident memory; None for no bound.
      start_seconds: from its start to the first event, where that is more than `seconds`: it imports JAX and the
        target.
    """

    seconds: float
    memory_bytes: int | None
    start_seconds: float = 120.0


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
      how: "ok" (exit code 0 or 1, by itself), "aborted", "timeout" or "memory".
      words: what happened, for a person.
    """

    how: str
    words: str


def run(module: str, request: dict[str, Any], on_event: Callable[[dict[str, Any]], None], bounds: Bounds) -> Ended:
    """Run `python -m module` with a request on its standard input until it ends or leaves its bounds.

    Args:
      module: a module that reads a JSON request and writes JSON events to the descriptor `request["events"]`.
      request: the request, without `events`.
      on_event: called for each event, in this thread.
      bounds: what the child may take. A child that leaves them is killed, with all it started.
    """
    with _child(module, request) as (process, events, errors), selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        allowed = max(bounds.seconds, bounds.start_seconds)
        deadline = time.monotonic() + allowed
        pending = b""
        while True:
            if selector.select(timeout=_LOOK_EVERY_S):
                data = os.read(events, 1 << 16)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    on_event(json.loads(line))
                allowed = bounds.seconds
                deadline = time.monotonic() + allowed
            if time.monotonic() > deadline:
                return Ended("timeout", f"not done after {allowed:g} s")
            used = resident_bytes(process.pid)
            if bounds.memory_bytes is not None and used is not None and used > bounds.memory_bytes:
                return Ended("memory", f"used {used / 2**30:.1f} GiB of memory, "
                                       f"{bounds.memory_bytes / 2**30:.1f} GiB are allowed")
        code = process.wait()
        if code in (0, 1):
            return Ended("ok", "")
        return Ended("aborted", f"the process {how_it_ended(code)}{_last_words(errors)}")


@contextmanager
def _child(module: str, request: dict[str, Any]) -> Iterator[tuple[Any, int, Any]]:
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                   stderr=errors, pass_fds=(write_end,), start_new_session=True)
        os.close(write_end)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request | {"events": write_end}).encode())
            process.stdin.close()
            yield process, read_end, errors
        finally:
            os.close(read_end)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None where the system does not tell (it is gone, or this is no Linux)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def available_bytes() -> int | None:
    """Memory that new processes can have on this machine; None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            for line in info:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def how_it_ended(code: int) -> str:
    """An exit code in words that follow a noun: "was ended by SIGABRT"."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _last_words(errors: Any) -> str:
    """The fatal line of what the child wrote to its standard error, if there is one."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - (1 << 16)))
    lines = errors.read().decode(errors="replace").splitlines()
    fatal = [line for line in lines if line.startswith("F") and "]" in line or "Check failed" in line]
    return f": {fatal[0].strip()[:300]}" if fatal else ""
