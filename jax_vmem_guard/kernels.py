"""Reads the TPU kernels out of a lowered program: every `tpu_custom_call` of its StableHLO becomes a `Kernel`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Window:
    """One operand or result of a kernel, as the kernel sees it.

    Attributes:
      operand: position among the kernel's operands (inputs first, then outputs), scalar prefetch included.
      role: "prefetch", "input" or "output".
      array_shape: shape of the whole array (per device, as the custom call takes it).
      block_shape: shape of the block in memory, squeezed dimensions left out.
      dtype: element type in MLIR's short form: "bf16", "f32", "i8".
      memory_space: "vmem", "smem", "any", "hbm", "semaphore".
      buffers: how many blocks are resident: 1 or 2; 0 where nothing is in VMEM.
      block_bytes: padded bytes of one block in VMEM; 0 where nothing is in VMEM.
      synchronous: the kernel asked for single buffering (`pl.Buffered(1)` or a constant index map).
      constant_index: the index map is provably the same in every grid step.
      varies_with: grid axes (positions) the block index depends on; None where that cannot be told.
    """

    operand: int
    role: str
    array_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: str
    memory_space: str
    buffers: int
    block_bytes: int
    synchronous: bool = False
    constant_index: bool = False
    varies_with: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A scratch operand or an in-body allocation (`memref.alloca`), in bytes after padding."""

    shape: tuple[int, ...]
    dtype: str
    memory_space: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One custom call of a lowered program that runs on a TPU core.

    Attributes:
      ordinal: position among the module's TPU custom calls, in walk order.
      fingerprint: hex digest of the kernel's own code with locations removed, operand and result types and layouts,
        and of what the custom call asks for (colors, aliases, flags), but not of its limit.
      name: kernel name, as Pallas gave it.
      source: "file:line" of the `pallas_call` in the user's code; None where the module has no locations.
      core: "tc" (TensorCore) or "sc" (SparseCore).
      grid: iteration bounds; None stands for a dynamic bound.
      windows: operands and results.
      scratch: scratch operands, semaphores and SMEM included (their `bytes` are 0).
      allocas: allocations in the body that count (nested ones add up, of siblings the largest path).
      alloca_bytes: VMEM bytes of the largest path through `allocas`.
      limit_bytes: the limit the kernel sets itself (`vmem_limit_bytes`); None where it follows the default.
      input_colors / output_colors: memory space XLA must place an operand / result in: position -> color.
      aliases: (output, input) pairs.
      allow_input_fusion: operands XLA may fuse their producer into.
      communicates: the kernel talks to other devices (collective id, remote DMA, barrier): it cannot run alone.
      target: custom call target, "tpu_custom_call".
      readable: the kernel's Mosaic module could be decoded; where False, windows and scratch are empty.
    """

    ordinal: int
    fingerprint: str
    name: str
    source: str | None
    core: str
    grid: tuple[int | None, ...]
    windows: tuple[Window, ...]
    scratch: tuple[Buffer, ...]
    allocas: tuple[Buffer, ...]
    alloca_bytes: int
    limit_bytes: int | None
    input_colors: dict[int, int] = field(default_factory=dict, hash=False)
    output_colors: dict[int, int] = field(default_factory=dict, hash=False)
    aliases: tuple[tuple[int, int], ...] = ()
    allow_input_fusion: tuple[bool, ...] = ()
    communicates: bool = False
    target: str = "tpu_custom_call"
    readable: bool = True

    @property
    def window_bytes(self) -> int:
        """VMEM bytes of all windows, buffering included."""
        return sum(w.block_bytes * w.buffers for w in self.windows)

    @property
    def scratch_bytes(self) -> int:
        """VMEM bytes of the scratch operands."""
        return sum(b.bytes for b in self.scratch)


def read_kernels(module: Any) -> tuple[Kernel, ...]:
    """The kernels of a StableHLO module, in walk order.

    Custom calls inside functions, loops, branches and `shard_map` bodies are found; a function called twice holds its
    kernels once.

    Args:
      module: an MLIR `ir.Module`, or StableHLO text or bytecode.
    """
    raise NotImplementedError
