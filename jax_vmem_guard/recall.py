"""What the plan file knows about one program, and what it learns from it.

An entry belongs to a kernel, but the same kernel may compile as it is in another program, where XLA has room to place
an operand in VMEM by itself. So before the compiler has spoken an entry counts only in programs it was seen in; after a
failure it spares the probes in any.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jax_vmem_guard import _jax, agreement
from jax_vmem_guard._version import __version__
from jax_vmem_guard.changes import DECLARED, Change
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.plan_file import PlanFile, installed_versions, resolve_path
from jax_vmem_guard.plan_format import Entry, Environment, by_fingerprint, from_text, to_text
from jax_vmem_guard.policy import Policy

_numbers: dict[Path, int] = {}  # the plan files of this process, in the order of their first use


@dataclass(frozen=True, kw_only=True)
class Recollection:
    """What is known of one program.

    Attributes:
      certain: fingerprint -> changes that made this very program compile; empty where that is not known.
      compile_change: the change of the whole compile that goes with `certain`, or None.
      hints: fingerprint -> changes that made other programs with this kernel compile.
      failure: why this very program did not compile under a policy that allowed as much, or None.
    """

    certain: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    compile_change: Change | None = None
    hints: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def is_certain(self) -> bool:
        return bool(self.certain) or self.compile_change is not None


def recollect(entries: Mapping[str, tuple[Entry, ...]], *, program: str, kernels: Iterable[str],
              policy: Policy) -> Recollection:
    """What entries say about a program. Pure.

    Args:
      entries: fingerprint -> entries, all of the environment the program is compiled in.
      program: the program's digest.
      kernels: fingerprints of its kernels.
      policy: an entry whose changes it does not allow does not count.
    """
    certain: dict[str, tuple[Change, ...]] = {}
    hints: dict[str, tuple[Change, ...]] = {}
    failures: list[str] = []
    for fingerprint in (*kernels, program):
        for entry in entries.get(fingerprint, ()):
            here = program in entry.programs
            if entry.outcome == "failed":
                if here and entry.guard == __version__ and set(policy.remedies) <= set(entry.remedies):
                    failures.append(f"`{entry.kernel}`: {entry.reason or 'nothing worked'}")
            elif all(change.remedy in (*policy.remedies, *DECLARED) for change in entry.changes):
                (certain if here else hints)[fingerprint] = entry.changes
    whole = certain.pop(program, ())
    hints.pop(program, None)
    return Recollection(certain=certain, compile_change=whole[0] if whole else None, hints={**hints, **certain},
                        failure="; ".join(failures) or None)


class Memory:
    """The plan file, as far as one program is concerned. Nothing here raises, whatever happened to the file."""

    def __init__(self, plan_file: PlanFile | None, program: _jax.Program, policy: Policy, chip: Chip):
        self._file, self._program, self._policy, self._chip = plan_file, program, policy, chip

    @classmethod
    def of(cls, program: _jax.Program, policy: Policy, chip: Chip) -> Memory:
        """The memory that the policy names; a blank one that keeps nothing where it names none."""
        path = resolve_path(policy.plan_file)
        return cls(PlanFile.at(path) if path is not None else None, program, policy, chip)

    @functools.cached_property
    def environment(self) -> Environment:
        return environment_of(self._program, self._chip)

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the program; see `program_digest`."""
        return program_digest(self._program, self._kernels)

    def recollect(self) -> Recollection:
        """What is known of the program; says once where an entry for one of its kernels is of another environment."""
        if self._file is None:
            return Recollection()
        entries = self._entries
        stale = {entry.fingerprint for entry in self._file.stale(self.environment)}
        if not entries and not stale:
            return Recollection()
        fingerprints = tuple(dict.fromkeys(kernel.fingerprint for kernel in self._kernels))
        self._file.say_stale(self.environment, stale.intersection(fingerprints))
        of_programs = (f in entry.programs for f, group in entries.items() for entry in group)
        if not (any(f in entries for f in fingerprints) or any(of_programs)):
            return Recollection()
        return recollect(entries, program=self.digest, kernels=fingerprints, policy=self._policy)

    def repaired(self, changes: Iterable[Change], used_bytes: Mapping[str, int]) -> None:
        """Keeps what made the program compile.

        Args:
          changes: all changes, in the order they are applied.
          used_bytes: fingerprint -> scoped VMEM the compiled kernel used, as far as that is known.
        """
        by_kernel: dict[str, list[Change]] = {}
        for change in changes:
            by_kernel.setdefault(change.fingerprint or self.digest, []).append(change)
        self._record(
            self._entry(fingerprint, group[0].kernel, group[0].source, outcome="repaired", changes=tuple(group),
                        used_bytes=used_bytes.get(fingerprint), edit="; ".join(change.edit for change in group))
            for fingerprint, group in by_kernel.items())

    def failed(self, reasons: Mapping[str, str]) -> None:
        """Keeps that kernels of the program could not be made to fit: fingerprint -> why."""
        kernels = {kernel.fingerprint: kernel for kernel in self._kernels if kernel.fingerprint in reasons}
        self._record(self._entry(fingerprint, kernel.name, kernel.source, outcome="failed", reason=reasons[fingerprint])
                     for fingerprint, kernel in kernels.items())

    def _entry(self, fingerprint: str, kernel: str, source: str | None, *, outcome: str,
               changes: tuple[Change, ...] = (), used_bytes: int | None = None, reason: str | None = None,
               edit: str = "") -> Entry:
        return Entry(fingerprint=fingerprint, kernel=kernel, source=source, environment=self.environment,
                     outcome=outcome, changes=changes, used_bytes=used_bytes, reason=reason, edit=edit,
                     programs=(self.digest,), remedies=self._policy.remedies, guard=__version__)

    def _record(self, entries: Iterable[Entry]) -> None:
        # Of several processes only the one whose file counts writes: a thousand hosts do not queue for one lock.
        processes = self._program.processes
        if self._file is not None and (len(processes) <= 1 or _jax.process_id() == min(processes)):
            self._file.record(entries)

    @functools.cached_property
    def _kernels(self) -> tuple[Kernel, ...]:
        return read_kernels(self._program.module)

    @functools.cached_property
    def _entries(self) -> Mapping[str, tuple[Entry, ...]]:
        """What counts in this environment: of several processes that run the program, what the lowest one knows."""
        if self._file is None:
            return {}
        own = self._file.entries(self.environment)
        processes = self._program.processes
        if len(processes) <= 1:
            return own
        mine = to_text(entry for entries in own.values() for entry in entries)
        # The file lies at another place on another host; which one is meant follows from the order of their first use.
        number = _numbers.setdefault(self._file.path, len(_numbers))
        theirs = agreement.from_leader(f"plan file {number} for {self.environment}", mine, processes=processes,
                                       timeout_s=self._policy.agreement_timeout_s)
        try:
            return by_fingerprint(from_text(theirs)) if theirs is not None else {}
        except ValueError:  # another version of the guard leads; the agreement on the program says so if it matters
            return {}


def environment_of(program: _jax.Program, chip: Chip) -> Environment:
    """The environment a program is compiled in. A libtpu that is no installed package says itself what it is."""
    jax_version, libtpu = installed_versions()
    if libtpu == "none" or not _library_is_installed_one():
        build = re.search(r"cl/\d+", program.platform_version)
        libtpu = build.group() if build else program.platform_version.replace("\n", " ")
    return Environment(chip=chip.name, jax=jax_version, libtpu=libtpu)


def _library_is_installed_one() -> bool:
    """Whether the compiler is the installed package's and not one that `TPU_LIBRARY_PATH` names. JAX sets that itself."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    package = importlib.util.find_spec("libtpu")
    folders = package.submodule_search_locations if package is not None else None
    return not path or any(os.path.realpath(path).startswith(os.path.realpath(folder)) for folder in folders or ())


#: A kernel's code and, in jax 0.12, its source locations, in base64, as MLIR prints a backend config.
_BODY = re.compile(r'\\22(?:body|debug_locations)\\22: ?\\22[^\\"]*\\22')


def program_digest(program: _jax.Program, kernels: Iterable[Kernel]) -> str:
    """16 hex digits for what the compiler is given, source locations left out.

    The module's text without locations, the kernels by their fingerprints (their code has locations inside), and all
    that sets a limit: the caller's compile options and libtpu's flags.
    """
    parts = (
        _BODY.sub("", _jax.text_without_locations(program.module)),
        [kernel.fingerprint for kernel in kernels],
        sorted((name, str(value)) for name, value in program.compiler_options.items()),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
