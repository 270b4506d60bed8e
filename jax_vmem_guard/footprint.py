"""What a kernel needs in scoped VMEM, told from its own code before the compiler says it.

Windows, scratch operands and allocations of the body follow an exact rule (`tiling.py`, `scratch_use.py`); spill slots
are estimated from the body (`spills.py`). Three numbers come with stated
meaning: `certain` is never above the real need, `expected` is the likely one, `at_most` covers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_vmem_guard.chips import Chip
from jax_vmem_guard.kernel_analysis import analyse, held_registers_of
from jax_vmem_guard.kernels import VMEM_CONFIG, Kernel, Window
from jax_vmem_guard.matmul_pressure import REGISTER_BYTES
from jax_vmem_guard.mosaic import Ref
from jax_vmem_guard.spills import spill_slots
from jax_vmem_guard.tiling import element_bits, padded_bytes, padded_shape

FIRST_VERSION_THAT_KEEPS_TWO_BUFFERS = 9
"""Stable Mosaic version (November 2025) from which the compiler no longer drops to one buffer by itself."""


INTERNAL_SCRATCH_BYTES = {5: 36864, 6: 73728, 7: 73728}
"""What the compiler keeps for itself where a kernel needs it; seen used on v5e only (ragged paged attention)."""

AT_MOST_FACTOR = 1.2
"""Margin of `at_most_bytes`; with it 99 % of kernels that the model was never fitted to are covered."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One buffer of a kernel in VMEM.

    Attributes:
      kind: "window", "scratch", "alloca" or "spills".
      role: "input", "output" or "prefetch" for a window, else "".
      position: operand position of a window, position among the scratch operands, or in the chain of allocations.
      shape: shape without padding; () for spill slots.
      padded_shape: shape as it lies in VMEM.
      dtype: element type in MLIR's short form.
      buffers: how many copies are resident; for spill slots their number; 0 for scratch that stays in registers.
      bytes: all of them together, padding included.
    """

    kind: str
    role: str
    position: int
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: str
    buffers: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Scoped VMEM a kernel needs on one chip, in bytes.

    Attributes:
      window_bytes: windows, buffering and padding included; operands pinned to VMEM by color take none.
      scratch_bytes: scratch operands in VMEM.
      alloca_bytes: allocations of the body that live at the same time, at most.
      forwarded_bytes: the part of scratch and allocations that the compiler keeps in registers: it costs nothing.
      spill_bytes: spill slots expected.
      certain_bytes: never above the real need: what is there even if XLA places every operand it could in VMEM itself.
      expected_bytes: the likely need of the kernel alone.
      at_most_bytes: covers the need; the chip's capacity where the need cannot be told.
      items: the buffers behind these numbers, largest first.
      unknown: reasons why the need can differ from what is written here, in words.
    """

    window_bytes: int
    scratch_bytes: int
    alloca_bytes: int
    forwarded_bytes: int
    spill_bytes: int
    certain_bytes: int
    expected_bytes: int
    at_most_bytes: int
    items: tuple[Item, ...]
    unknown: tuple[str, ...]


def footprint(kernel: Kernel, chip: Chip, limit_bytes: int | None = None) -> Footprint:
    """The scoped VMEM a kernel needs on a chip.

    Args:
      kernel: the kernel.
      chip: where it is to run.
      limit_bytes: the limit in force, which decides what room XLA has to place operands in VMEM; where not given, the
        kernel's own or else the chip's default. A flag that lowers the default must be told here.

    A kernel that could not be decoded, and one for the SparseCore (it has memory of its own), gives zeros and the
    reason in `unknown`.
    """
    unknown = _unknown(kernel)
    if not kernel.readable or kernel.code is None or kernel.core != "tc":
        return Footprint(window_bytes=0, scratch_bytes=0, alloca_bytes=0, forwarded_bytes=0, spill_bytes=0,
                         certain_bytes=0, expected_bytes=0, items=(), unknown=unknown,
                         at_most_bytes=chip.capacity_bytes if kernel.core == "tc" else 0)
    analysis = analyse(kernel.code)
    in_registers = analysis.forwarded_scratch if analysis else frozenset()
    windows = tuple(
        _item("window", w.role, w.operand, w.block_shape, w.dtype, w.buffers, chip)
        for w in kernel.windows if w.buffers and not _is_pinned(w, kernel)
    )
    scratch = tuple(
        _item("scratch", "", i, r.shape, r.dtype, 0 if i in in_registers else 1, chip)
        for i, r in enumerate(kernel.scratch) if r.memory_space == "vmem"
    )
    declared = sum(_bytes(r, chip) for r in kernel.scratch)
    all_allocas = max((_total(_chain(c, chip)) for c in kernel.alloca_chains), default=0)
    chains = analysis.alloca_chains if analysis else kernel.alloca_chains
    allocas = max((_chain(c, chip) for c in chains), key=_total, default=())
    limit = limit_bytes if limit_bytes is not None else kernel.limit_bytes or chip.default_limit_bytes
    known = _total(windows) + _total(scratch) + _total(allocas)
    held = held_registers_of(kernel.code, chip.generation)
    spills = _slots(held.expected if held else 0)
    most = _total(windows) + declared + all_allocas + _slots(held.at_most if held else 0)
    if held is None or analysis is None:
        unknown += ("the kernel's body has a form whose spill slots cannot be told",)
    elif analysis.unmeasured:
        unknown += (f"the body has operations no measured kernel has: {', '.join(analysis.unmeasured)}",)
    at_most = int(AT_MOST_FACTOR * most) + INTERNAL_SCRATCH_BYTES.get(max(5, chip.generation), 73728)
    return Footprint(
        window_bytes=_total(windows),
        scratch_bytes=declared,
        alloca_bytes=all_allocas,
        forwarded_bytes=declared + all_allocas - _total(scratch) - _total(allocas),
        spill_bytes=spills,
        certain_bytes=certain_window_bytes(kernel, chip, limit) + (
            _total(scratch) + _total(allocas) if analysis else 0),
        expected_bytes=known + spills,
        at_most_bytes=max(at_most, chip.capacity_bytes) if unknown else at_most,
        items=tuple(sorted(windows + scratch + allocas + _spill_item(spills), key=lambda item: -item.bytes)),
        unknown=unknown,
    )


def block_bytes(window: Window, chip: Chip) -> int:
    """Bytes of one block of a window in VMEM, padding included; 0 where nothing of it is in VMEM."""
    return padded_bytes(window.block_shape, window.dtype, chip.generation) if window.buffers else 0


def certain_window_bytes(kernel: Kernel, chip: Chip, limit_bytes: int) -> int:
    """The least the windows can take, whatever XLA places in VMEM by itself.

    XLA may keep whole operands and results in VMEM; then their windows cost nothing. It has the chip's capacity less
    the kernel's limit for them (libtpu 0.0.52: on v5e at most 112 MiB beside the default limit, 68 beside one of 60;
    on v6e 96 and 67). What it can take away at best is bounded by filling that room with the arrays that free most for
    their size, the last one in part. Operands of the same size may be one array, which is then placed once. Inputs a
    producer may be fused into are left out, and a module from before stable Mosaic version 9 counts with one buffer
    for each window.
    """
    drops_to_one = kernel.ir_version is not None and kernel.ir_version < FIRST_VERSION_THAT_KEEPS_TWO_BUFFERS
    fusible = {i for i, allowed in enumerate(kernel.allow_input_fusion) if allowed}
    room = max(0, chip.capacity_bytes - limit_bytes)
    total = 0
    movable: dict[int, int] = {}  # bytes of an array -> bytes of its windows
    for window in kernel.windows:
        if not window.buffers or _is_pinned(window, kernel) or (window.role == "input" and window.operand in fusible):
            continue
        cost = block_bytes(window, chip) * (1 if drops_to_one else window.buffers)
        array = _array_bytes(window)
        total += cost
        if array <= room:
            movable[array] = movable.get(array, 0) + cost
    for array, cost in sorted(movable.items(), key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf):
        if array <= room:
            room -= array
            total -= cost
        else:
            total -= math.ceil(cost * room / array)
            break
    return max(0, total)


def _array_bytes(window: Window) -> int:
    """Bytes of a whole operand without padding: the least it can take anywhere."""
    bits = 8 if window.dtype == "i1" else element_bits(window.dtype)
    return math.prod(window.array_shape) * bits // 8


def _is_pinned(window: Window, kernel: Kernel) -> bool:
    """Whether the custom call makes XLA keep the whole operand or result in VMEM."""
    if window.role == "output":
        first = min(w.operand for w in kernel.windows if w.role == "output")
        return kernel.output_colors.get(window.operand - first) == VMEM_CONFIG
    return kernel.input_colors.get(window.operand) == VMEM_CONFIG


def _item(kind: str, role: str, position: int, shape: tuple[int, ...], dtype: str, buffers: int, chip: Chip) -> Item:
    static = tuple(max(d, 0) for d in shape)
    return Item(
        kind=kind, role=role, position=position, shape=shape, dtype=dtype, buffers=buffers,
        padded_shape=padded_shape(static, dtype, chip.generation),
        bytes=padded_bytes(static, dtype, chip.generation) * buffers,
    )


def _chain(chain: tuple[Ref, ...], chip: Chip) -> tuple[Item, ...]:
    return tuple(
        _item("alloca", "", i, r.shape, r.dtype, 1, chip) for i, r in enumerate(chain) if r.memory_space == "vmem"
    )


def _bytes(ref: Ref, chip: Chip) -> int:
    static = tuple(max(d, 0) for d in ref.shape)
    return padded_bytes(static, ref.dtype, chip.generation) if ref.memory_space == "vmem" else 0


def _slots(held: float) -> int:
    """Bytes of spill slots for so many registers held at once: whole slots."""
    return math.ceil(spill_slots(held)) * REGISTER_BYTES


def _spill_item(size: int) -> tuple[Item, ...]:
    if not size:
        return ()
    return (Item(kind="spills", role="", position=0, shape=(), padded_shape=(), dtype="", buffers=size // REGISTER_BYTES,
                 bytes=size),)


def _total(items: tuple[Item, ...]) -> int:
    return sum(item.bytes for item in items)


def _unknown(kernel: Kernel) -> tuple[str, ...]:
    reasons = []
    if not kernel.readable:
        reasons.append("the custom call holds no Mosaic code this JAX can read")
    if kernel.core != "tc":
        reasons.append("the kernel runs on the SparseCore, which has memory of its own")
    if any(kernel.allow_input_fusion):
        reasons.append("XLA may fuse producers into the kernel (allow_input_fusion), which adds windows of their own")
    refs = [w.block_shape for w in kernel.windows] + [r.shape for r in kernel.scratch]
    refs += [r.shape for chain in kernel.alloca_chains for r in chain]
    if any(d < 0 for shape in refs for d in shape):
        reasons.append("a buffer has a size known only at run time")
    return tuple(reasons)
