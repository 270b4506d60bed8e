"""What probes of this process reported corrects the expectation for the same kernel code at other block sizes.

Windows and scratch are exact already; what is learned is how far the model of the spill slots was off for this code on
this kind of chip. The store is process-wide, and what is in it can be written to a plan file and loaded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.chips import Chip
from jax_vmem_guard.footprint import Footprint, footprint
from jax_vmem_guard.kernel_analysis import analyse
from jax_vmem_guard.kernel_body import Op
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.locks import ForkSafeLock

WIDEST_CORRECTION = 4.0
"""A correction never changes the spill slots by more than this factor."""

NEAR_ENOUGH = (0.95, 1.12)
"""Expected over used at which an observation corrects nothing."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the compiler used for one kernel alone, beside what was expected. Sizes are bytes.

    Attributes:
      code: identifies the kernel's code without its block sizes (`code_identity`).
      fingerprint: identifies the kernel with them.
      chip: short name of the chip.
      used: scoped VMEM the compiler used.
      known: windows, scratch and allocations that need memory.
      spills: spill slots the model expected.
    """

    code: str
    fingerprint: str
    chip: str
    used: int
    known: int
    spills: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `json` can write."""
        return dataclasses.asdict(self)


def code_identity(kernel: Kernel) -> str | None:
    """The same for a kernel at all block sizes: its operations in order, its element types, its name.

    None where the body cannot be told. Code that is unrolled over a block differs with the block; then nothing is
    carried over, which is right.
    """
    analysis = analyse(kernel.code) if kernel.code is not None else None
    if analysis is None:
        return None
    digest = hashlib.sha256(kernel.name.encode())
    for word in _words(analysis.ops):
        digest.update(word.encode())
    return digest.hexdigest()


def _words(ops: tuple[Op, ...]) -> Iterator[str]:
    for op in ops:
        vectors = [v.dtype for v in op.results if v.shape is not None]
        if vectors or op.blocks or any(v.shape is not None for v in op.operands):
            yield f"{op.name}:{','.join(vectors)};"
        for block in op.blocks:
            yield "{"
            yield from _words(block)
            yield "}"


class Learned:
    """Observations by code and chip."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._observed: dict[tuple[str, str], dict[str, Observation]] = {}

    def observe(self, kernel: Kernel, chip: Chip, used_bytes: int) -> Observation | None:
        """Remember what the compiler used for a kernel compiled alone with its limit at the chip's capacity.

        Where it used less than windows and scratch take, XLA had placed operands in VMEM: that says nothing about the
        body, and None is returned.
        """
        code = code_identity(kernel)
        need = footprint(kernel, chip)
        known = need.expected_bytes - need.spill_bytes
        if code is None or used_bytes < known:
            return None
        observation = Observation(code=code, fingerprint=kernel.fingerprint, chip=chip.name, used=used_bytes,
                                  known=known, spills=need.spill_bytes)
        self.load([observation])
        return observation

    def load(self, observations: Iterable[Observation]) -> None:
        """Take in observations, from a plan file for example."""
        with self._lock:
            for o in observations:
                self._observed.setdefault((o.code, o.chip), {})[o.fingerprint] = o

    def observations(self) -> tuple[Observation, ...]:
        """All of them, sorted, so that two processes that saw the same write the same."""
        with self._lock:
            all_ = [o for by_print in self._observed.values() for o in by_print.values()]
        return tuple(sorted(all_, key=lambda o: (o.code, o.chip, o.fingerprint)))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._observed.clear()

    def footprint(self, kernel: Kernel, chip: Chip, limit_bytes: int | None = None) -> Footprint:
        """`footprint.footprint`, its expectation corrected by what was observed of the same code on the same chip.

        The observation nearest in size counts; one of this very kernel is the answer. `certain_bytes` stays as it is.
        """
        need = footprint(kernel, chip, limit_bytes)
        code = code_identity(kernel)
        with self._lock:
            known = dict(self._observed.get((code, chip.name), {})) if code is not None else {}
        if not known:
            return need
        same = known.get(kernel.fingerprint)
        base = need.expected_bytes - need.spill_bytes
        if same is not None:
            return dataclasses.replace(need, spill_bytes=same.used - base, expected_bytes=same.used,
                                       at_most_bytes=same.used)
        nearest = min(known.values(), key=lambda o: (abs(math.log((o.known + 1) / (base + 1))), o.fingerprint))
        spills = _corrected(need.spill_bytes, base, nearest)
        return dataclasses.replace(need, spill_bytes=spills, expected_bytes=base + spills,
                                   at_most_bytes=max(need.at_most_bytes, math.ceil(1.2 * (base + spills))))


def _corrected(spills: int, base: int, seen: Observation) -> int:
    """Spill slots expected at another size: off by the same factor, or where the model saw none, the same share.

    Where the model was near enough at the other size, it stands.
    """
    if NEAR_ENOUGH[0] <= (seen.known + seen.spills) / seen.used <= NEAR_ENOUGH[1]:
        return spills
    real = seen.used - seen.known
    if seen.spills:
        factor = min(WIDEST_CORRECTION, max(1 / WIDEST_CORRECTION, real / seen.spills))
        return math.ceil(spills * factor)
    return max(spills, math.ceil(base * real / seen.known)) if seen.known else spills


LEARNED = Learned()
"""What this process has learned; probes write to it."""
