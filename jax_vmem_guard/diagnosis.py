"""Understands what the TPU compiler says when VMEM does not suffice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One row of the compiler's itemised table: bytes, its tag ("input window allocation ..."), its owner."""

    size_bytes: int
    tag: str
    instruction: str | None
    kind: str  # "input window", "output window", "scratch", "spill slots", "internal", "other"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A compile failure understood.

    Attributes:
      form: "limit" (E1001 and its code-less twins), "capacity" ("Used X of Y vmem"), "allocation" (one allocation
        alone exceeds the memory), "pinned" (too many buffers colored into VMEM).
      instruction: name of the HLO instruction that failed, without `%`; None where the text does not say.
      is_kernel: whether it is a kernel's custom call, or a fusion around one; None where the text does not say.
      size_bytes: what the message says was needed. For "limit" a lower bound of the need.
      limit_bytes: the limit in the message ("limit"), else None.
      capacity_bytes: the chip's VMEM in the message ("capacity", "allocation"), else None.
      op_name: JAX's op_name metadata: "jit(f)/pallas_call".
      source: "file:line".
      breakdown: itemised allocations, largest first, as the compiler lists them.
      text: the part of the message that was understood.
    """

    form: str
    instruction: str | None
    is_kernel: bool | None
    size_bytes: int | None
    limit_bytes: int | None
    capacity_bytes: int | None
    op_name: str | None
    source: str | None
    breakdown: tuple[Allocation, ...]
    text: str
    label: str | None = None


def diagnose(error: BaseException | str) -> Diagnosis | None:
    """What a compile failure means, or None where it is not about VMEM."""
    raise NotImplementedError
