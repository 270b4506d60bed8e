"""The rows that `check`, `rehearse` and a `Report`'s page show: one kernel of one program on one chip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

FITS, REPAIRED, FAILS = "fits", "repaired", "fails"
ERROR, ABORTED, MEMORY, TIMEOUT, UNKNOWN = "error", "aborted", "memory", "timeout", "unknown"
VERDICT_WORDS = {
    FITS: "fits",
    REPAIRED: "fits after repair",
    FAILS: "does not fit",
    ERROR: "does not compile",
    ABORTED: "compiler aborted",
    MEMORY: "compiler out of memory",
    TIMEOUT: "out of time",
    UNKNOWN: "no verdict",
}
"""Verdicts: the first two are good news; `FAILS` is about VMEM; the others are about something else."""

GOOD = (FITS, REPAIRED)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One buffer of a kernel: what it is, its block's shape and type, how many copies, bytes in all, a remark."""

    what: str
    shape: str
    dtype: str
    buffers: int
    bytes: int
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel of one program on one chip. Sizes are bytes; None is unknown.

    Attributes:
      program: name of the jitted function or of the target.
      kernel: the kernel's name; for a failure that names no kernel, the instruction or the program.
      source: "file:line", or None.
      topology: topology it was compiled for, or the chip's name where nothing was compiled.
      chip: the chip's short name.
      verdict: a key of `VERDICT_WORDS`.
      need_bytes: what it uses after all changes (compiled), or is expected to need.
      measured: `need_bytes` is what the compiler reported.
      limit_bytes: scoped VMEM limit in force, after all changes.
      capacity_bytes: what the chip has.
      windows_bytes, scratch_bytes, body_bytes, spills_bytes: where the need goes, as far as it is itemised.
      changes: what was changed, in words.
      reason: why there is no better verdict.
      edit: source edit that would make the changes permanent, or that would help.
      items: the buffers behind the sums.
    """

    program: str
    kernel: str
    source: str | None = None
    topology: str
    chip: str
    verdict: str
    need_bytes: int | None = None
    measured: bool = False
    limit_bytes: int | None = None
    capacity_bytes: int | None = None
    windows_bytes: int = 0
    scratch_bytes: int = 0
    body_bytes: int = 0
    spills_bytes: int = 0
    changes: tuple[str, ...] = ()
    reason: str | None = None
    edit: str | None = None
    items: tuple[Item, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """What the chip has beyond the need; negative where the need is more."""
        if self.need_bytes is None or self.capacity_bytes is None:
            return None
        return self.capacity_bytes - self.need_bytes

    @property
    def share(self) -> float | None:
        """The need as a share of the chip's capacity."""
        if self.need_bytes is None or not self.capacity_bytes:
            return None
        return self.need_bytes / self.capacity_bytes

    @property
    def unsplit_bytes(self) -> int:
        """The part of the need that no segment explains."""
        known = self.windows_bytes + self.scratch_bytes + self.body_bytes + self.spills_bytes
        return max(0, (self.need_bytes or 0) - known)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values that `json` can write, headroom and share included."""
        return asdict(self) | {"headroom_bytes": self.headroom_bytes, "share": self.share}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """The row that `to_dict` wrote."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        values["changes"] = tuple(values.get("changes", ()))
        values["items"] = tuple(Item(**item) for item in values.get("items", ()))
        return cls(**values)


def exit_code(rows: Iterable[Row], *, max_share: float | None = None) -> int:
    """0 where every kernel fits as it is or after repair, 1 where one does not, 2 where that could not be told of one.

    Args:
      rows: the rows.
      max_share: a kernel that needs more than this share of the chip's capacity counts as one that does not fit.
    """
    rows = tuple(rows)
    if any(row.verdict == FAILS or exceeds(row, max_share) for row in rows):
        return 1
    return 2 if any(row.verdict not in GOOD for row in rows) else 0


def exceeds(row: Row, max_share: float | None) -> bool:
    """Whether the kernel fits but leaves less of the chip than `max_share` asks for."""
    return max_share is not None and row.share is not None and row.share > max_share


def summary(rows: Sequence[Row]) -> str:
    """One sentence: how many kernels, on which chips, how many of each verdict."""
    if not rows:
        return "No TPU kernels."
    counts = [(sum(row.verdict == verdict for row in rows), words) for verdict, words in VERDICT_WORDS.items()]
    places = ", ".join(dict.fromkeys(row.topology for row in rows))
    parts = ", ".join(f"{count} {words}" for count, words in counts if count)
    return f"{len(rows)} kernel{'' if len(rows) == 1 else 's'} on {places}: {parts}."
