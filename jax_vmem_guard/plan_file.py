"""Outcomes remembered across processes: the plan file on disk.

A training job restarts many times; what made its kernels compile, and what did not, is kept in one JSON file. Nothing
that happens to that file may stop a program from compiling: every failure here is one warning.

How it holds together: readers take no lock, because the file is only ever replaced whole. Writers take an exclusive
`flock` on a side file, read, merge, write a temporary file and rename it over the old one. A writer killed at any
moment leaves the old file or the new one, and a temporary file that the next writer overwrites; the kernel drops its
lock. Works where jax is not installed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jax_vmem_guard.plan_format import (
    Entry,
    Environment,
    MalformedPlan,
    NewerPlan,
    by_fingerprint,
    from_text,
    merged,
    to_text,
)

__all__ = ["AUTO_NAME", "Entry", "Environment", "PlanFile", "installed_versions", "resolve_path"]

AUTO_NAME = "jax_vmem_guard_plan.json"
_LOCK_TIMEOUT_S = 10.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_logger = logging.getLogger("jax_vmem_guard")
_opened: dict[str, PlanFile] = {}
_said: dict[tuple[str, ...], object] = {}  # what this process has already warned about


class PlanFile:
    """One plan file. Cheap to make, safe to share between threads; several objects and processes may use one path."""

    def __init__(self, path: str | os.PathLike[str]):
        # The target of a symbolic link, so that replacing the file keeps the link.
        self.path = Path(os.path.realpath(path))
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        self._cache: tuple[tuple[int, ...], tuple[Entry, ...]] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> PlanFile:
        """The object this process has for a path, so that an unchanged file is parsed once."""
        return _opened.setdefault(os.fspath(path), cls(path))

    def entries(self, environment: Environment) -> dict[str, tuple[Entry, ...]]:
        """The outcomes that count in `environment`, by fingerprint; several where programs need different changes.

        Never raises: for a file that is missing, unreadable, corrupt or of a later format there are none, and all but
        a missing one is warned about, once.
        """
        return by_fingerprint(entry for entry in self._entries_or_warn() if entry.environment == environment)

    def stale(self, environment: Environment) -> tuple[Entry, ...]:
        """Entries of other environments for kernels that have no entry in `environment`. Never raises."""
        entries = self._entries_or_warn()
        here = {entry.fingerprint for entry in entries if entry.environment == environment}
        return tuple(e for e in entries if e.environment != environment and e.fingerprint not in here)

    def say_stale(self, environment: Environment, fingerprints: Iterable[str]) -> None:
        """Logs, once per kernel and process, that what is known of these kernels elsewhere is not applied here."""
        asked = set(fingerprints)
        for entry in self.stale(environment):
            if entry.fingerprint in asked and _first_time(str(self.path), "stale", entry.fingerprint):
                _logger.warning(
                    "plan file %s knows kernel `%s` on %s, but this is %s: the entry is not applied, the kernel is "
                    "looked at again. `jax-vmem-guard plan prune %s` removes entries of other versions.",
                    self.path, entry.kernel, entry.environment, environment, self.path)

    def record(self, entries: Iterable[Entry]) -> None:
        """Merges `entries` into the file; what it knew of the same kernels in the same programs is replaced.

        Never raises: where the file cannot be written the outcomes are not remembered, and that is one warning. A
        corrupt file, or one of a later format, is kept beside the new one under another name.
        """
        try:
            new = tuple(entries)
            if new:
                self.update(lambda old: merged(old, new))
        except Exception as error:  # the program has compiled; nothing about its memory may undo that
            self._warn("write", "cannot be written, so outcomes are not remembered: %s: %s. Make the path writable, "
                       "or set `plan_file` to another one.", type(error).__name__, error)

    def read(self) -> tuple[Entry, ...]:
        """All entries.

        Raises:
          OSError: the file is missing or unreadable.
          MalformedPlan, NewerPlan: it is no plan file, or one of a later format.
        """
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if self._cache is not None and self._cache[0] == signature:
                return self._cache[1]
            entries = _decode(file.read())
        self._cache = (signature, entries)
        return entries

    def update(self, change: Callable[[tuple[Entry, ...]], Iterable[Entry]]) -> None:
        """Replaces the entries by `change(entries)`, alone among all writers; an unchanged file is not touched.

        Raises:
          OSError: the file, its directory or its lock cannot be read or written.
          TypeError, ValueError: an entry is not JSON.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as temporary:
            try:
                before = self.path.read_bytes()
            except FileNotFoundError:
                before = None
            unusable: ValueError | None = None
            old: tuple[Entry, ...] = ()
            try:
                old = _decode(before) if before is not None else ()
            except (MalformedPlan, NewerPlan) as error:
                unusable = error
            after = to_text(change(old))
            from_text(after)  # what is written must be readable
            if unusable is not None:
                self._keep_aside(before or b"", unusable, temporary)
            if after.encode() != before:
                self._write_whole(after.encode(), self.path, temporary)

    def _entries_or_warn(self) -> tuple[Entry, ...]:
        try:
            return self.read()
        except FileNotFoundError:
            return ()
        except NewerPlan as error:
            self._warn("newer", "is not used: %s. Install the jax_vmem_guard that wrote it.", error)
        except MalformedPlan as error:
            self._warn("corrupt", "is not used: %s. `jax-vmem-guard plan check` looks at it again after you mended "
                       "it.", error)
        except Exception as error:
            self._warn("read", "cannot be read and is not used: %s: %s", type(error).__name__, error)
        return ()

    def _warn(self, topic: str, message: str, *values: object) -> None:
        if _first_time(str(self.path), topic):
            _logger.warning("plan file %s " + message, self.path, *values)

    def _keep_aside(self, content: bytes, error: Exception, temporary: Path) -> None:
        """Keeps the bytes of a file that is about to be replaced; named by content, so the same is kept once."""
        kind = "newer" if isinstance(error, NewerPlan) else "corrupt"
        kept = self.path.with_name(f"{self.path.name}.{kind}-{hashlib.sha256(content).hexdigest()[:12]}")
        if not kept.exists():
            self._write_whole(content, kept, temporary)
        self._warn(f"kept {kept.name}", "is started anew: %s. The old one is kept as %s.", error, kept)

    def _write_whole(self, content: bytes, target: Path, temporary: Path) -> None:
        """`content` as `target`, or an exception and `target` as it was."""
        try:
            with open(temporary, "wb") as file:
                with contextlib.suppress(OSError):  # the permissions of the file there was
                    os.fchmod(file.fileno(), stat.S_IMODE(os.stat(self.path).st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Path]:
        """Excludes other processes and other threads, waiting at most ten seconds for them.

        Gives the temporary file to write to. Its name is the same for every holder of the lock, so that the next one
        overwrites what a killed one left; where there are no locks it is one of its own.
        """
        # A description of its own for every holder: `flock` then excludes threads too.
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            alone = self._acquire(descriptor)
            owner = "" if alone else f".{os.getpid()}-{threading.get_ident()}"
            yield self.path.with_name(f".{self.path.name}{owner}.tmp")
        finally:
            with contextlib.suppress(OSError):  # explicitly: a child forked meanwhile holds the description open
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> bool:
        """True when locked, False in a file system that has no locks."""
        give_up = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(f"another process has held {self._lock_path} for {_LOCK_TIMEOUT_S:.0f} s"
                                       ) from None
                time.sleep(0.002)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                self._warn("lock", "lies in a file system without locks (%s): it is never torn, but of two processes "
                           "that write at once only one is remembered", error)
                return False


def resolve_path(setting: str | os.PathLike[str] | None) -> Path | None:
    """Where the plan file of `Policy.plan_file` is; None where there is none.

    "auto" is `jax_vmem_guard_plan.json` in JAX's compilation cache directory (`jax_compilation_cache_dir`). Without
    one, or with one that is no local directory ("gs://..."), there is no plan file, and that is one warning.
    """
    if setting is None or os.fspath(setting) == "":
        return None
    if os.fspath(setting) != "auto":
        return Path(setting).expanduser()
    import jax  # here, because only "auto" needs it

    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if cache and "://" not in str(cache):
        return Path(cache).expanduser() / AUTO_NAME
    if _first_time("auto", str(cache)):
        why = f"`jax_compilation_cache_dir` is {cache}, not a local directory" if cache else \
            "`jax_compilation_cache_dir` is not set"
        _logger.warning("plan_file=\"auto\" means a file in JAX's compilation cache, but %s: outcomes are not "
                        "remembered. Set `plan_file` to a path.", why)
    return None


@functools.cache
def installed_versions() -> tuple[str, str]:
    """The versions of jax and libtpu that are installed, "none" for one that is not."""
    return _version("jax"), _version("libtpu", "libtpu-nightly")


def _version(*distributions: str) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _decode(content: bytes) -> tuple[Entry, ...]:
    try:
        return from_text(content.decode())
    except UnicodeDecodeError as error:
        raise MalformedPlan(f"it is not UTF-8 text: {error}") from None


def _first_time(*topic: str) -> bool:
    mine = object()
    return _said.setdefault(topic, mine) is mine  # atomic, and needs no lock that a fork could copy while held
