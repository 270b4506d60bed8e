"""The vocabulary of a repair: one `Change` is one remedy applied to one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Remedies that the user's source declares (`vmem_guard.tunable`, `vmem_guard.fallback`); no policy has to allow them.
DECLARED = ("tunable", "fallback")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One remedy applied to one kernel of one program.

    Attributes:
      kernel: the kernel's name, as Pallas gave it.
      fingerprint: identifies the kernel (`Kernel.fingerprint`); all custom calls that have it get the change.
      source: "file:line" of the `pallas_call`, or None.
      remedy: "limit", "buffering", "coloring", "split", "tunable", "fallback" or "compile_limit".
      before: the state before, in words fit for a log line ("limit 16.00 MiB (default)").
      after: the state after, likewise.
      need_bytes: what the kernel needs in scoped VMEM after the change, as the compiler reported it; None if unknown.
      edit: the source edit that makes the change permanent.
      data: what the remedy's `apply` needs; JSON-serialisable, so that a plan file can hold it.
    """

    kernel: str
    fingerprint: str
    source: str | None
    remedy: str
    before: str
    after: str
    need_bytes: int | None
    edit: str
    data: dict[str, Any] = field(default_factory=dict, hash=False)
