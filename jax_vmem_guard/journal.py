"""What the guard changed in this process: a record and one log line per repair."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import MiB
from jax_vmem_guard.locks import ForkSafeLock

logger = logging.getLogger("jax_vmem_guard")


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A plan that made a program compile.

    Attributes:
      program: name of the jitted function, as in "jit_train_step".
      chip: chip name ("v5e"), or the device kind of a chip the table does not know.
      compiles: how often the whole program was compiled, the failing compiles included.
      probes: how often one kernel was compiled alone.
      changes: what was changed, one entry per kernel and remedy.
      remembered: the changes came from a plan file, before anything failed.
    """

    program: str
    chip: str
    compiles: int
    probes: int
    changes: tuple[Change, ...]
    remembered: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values that `json` can write."""
        return asdict(self)

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def __str__(self) -> str:
        how = f"{_count(self.compiles, 'compile')}, {_count(self.probes, 'probe')}"
        if self.remembered:
            how += ", from the plan file"
        lines = [f"{self.program} on {self.chip}: {_count(len(self.changes), 'change')} ({how})"]
        for change in self.changes:
            need = "" if change.need_bytes is None else f", needs {change.need_bytes / MiB:.2f} MiB"
            at = f" at {change.source}" if change.source else ""
            lines.append(f"  {change.kernel}{at}: {change.before} -> {change.after}{need}\n    to keep: {change.edit}")
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Journal:
    """The repairs of one process, in the order they were made. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._repairs: list[Repair] = []

    def record(self, repair: Repair) -> None:
        """Keep the repair and log it, once."""
        with self._lock:
            self._repairs.append(repair)
        logger.warning("%s", repair)

    def repairs(self) -> tuple[Repair, ...]:
        with self._lock:
            return tuple(self._repairs)

    def clear(self) -> None:
        with self._lock:
            self._repairs.clear()


#: The journal of this process: the one home of what was repaired.
journal = Journal()


def repairs() -> tuple[Repair, ...]:
    """Every repair made in this process, oldest first."""
    return journal.repairs()


def changes_to_json(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Changes as plain values, for plan files and logs."""
    return [asdict(change) for change in changes]
