"""What the TPU compiler says when VMEM does not suffice, word for word, with the numbers filled in.

The texts are those of libtpu 0.0.52 (jax 0.10.2); the guard and its users' error handling must not be able to tell them
from the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_vmem_guard.chips import Chip, KiB, MiB

FORMS = ("limit", "capacity", "allocation", "pinned")


@dataclass(frozen=True, kw_only=True)
class Victim:
    """What is to fail.

    Attributes:
      program: name of the program ("jit(f)").
      instruction: name of the HLO instruction without its number: the kernel's name, or "fusion".
      is_kernel: whether it is a kernel.
      limit_bytes: the scoped VMEM limit in force for it.
      chip: the chip it is compiled for.
      metadata: its `kernel_metadata`, as JSON text.
    """

    program: str
    instruction: str
    is_kernel: bool
    limit_bytes: int
    chip: Chip
    metadata: str = "{}"


def message(form: str, victim: Victim) -> str:
    """The compiler's text for a failure of this form; the sizes are ones that `form` can really have."""
    return {"limit": _limit, "capacity": _capacity, "allocation": _allocation, "pinned": _pinned}[form](victim)


def _limit(victim: Victim) -> str:
    size = victim.limit_bytes + max(victim.limit_bytes // 4, KiB)
    return (f"RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while "
            f"allocating on stack for %{_instruction(victim)}, metadata={{op_name=\"{_op_name(victim)}\" "
            f"stack_frame_id=4}}. Scoped allocation with size {_size(size)} and limit {_size(victim.limit_bytes)} "
            f"exceeded scoped vmem limit by {_size(size - victim.limit_bytes)}. It should not be possible to run out of "
            "scoped vmem - \nSee https://openxla.org/xla/errors/error_1001 for more details.")


def _capacity(victim: Victim) -> str:
    capacity = victim.chip.capacity_bytes
    used, half = capacity + 8 * MiB, (capacity + 8 * MiB) // 2
    tag = ("{} window allocation for operator {} 0. The window shape is f32[{rows},1024], while the full shape is "
           "f32[{all_rows},1024]. The u8 shape/size shown above represents the raw byte size of this window in VMEM. "
           "This allocation has 2 buffering levels.")
    rows = half // 2 // 4096
    allocations = "".join(f"""
  {i}. Size: {_size(half)}
     Operator: op_name="{_op_name(victim)}"
     Shape: u8[{half}]{{0}}
     Unpadded size: {_size(half)}
     Tag: {tag.format(role, role, rows=rows, all_rows=8 * rows)}
     XLA label: {_instruction(victim)}
     Allocation type: scoped
     ==========================
""" for i, role in ((1, "input"), (2, "output")))
    return (f"RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used "
            f"{_size(used)} of {_size(capacity)} vmem. Exceeded vmem capacity by {_size(used - capacity)}.\n\nProgram "
            f"vmem requirement {_size(used)}:\n    scoped           {_size(used)}\n\n  Largest program allocations in "
            f"vmem:\n{allocations}\n")


def _allocation(victim: Victim) -> str:
    size, memory = 2 * victim.chip.capacity_bytes, victim.chip.capacity_bytes
    return (f"RESOURCE_EXHAUSTED: Allocation (size={size}) would exceed memory (size={memory}) :: #allocation3 [shape = "
            f"'u8[{size}]{{0}}', space=vmem, size = {size:#x}, scoped, tag = 'input window allocation for operator "
            f"input 0. The window shape is f32[{size // 4096},1024], while the full shape is f32[{size // 2048},1024]. "
            "The u8 shape/size shown above represents the raw byte size of this window in VMEM. This allocation has 2 "
            f"buffering levels.'] :: {victim.instruction}.1")


def _pinned(victim: Victim) -> str:
    size = victim.chip.capacity_bytes
    return ("FAILED_PRECONDITION: Too many buffers are colored in the alternate memory. Could not reserve alternate "
            f"memory for buffer: HloBuffer 0, values: <0 x.1> with size: {size} for colored interval: {{ buffer: "
            f"{{null}}, size: {size}, start: 2, end: 2, num_colocations: 0, need_allocation: 1 }}")


def _instruction(victim: Victim) -> str:
    if not victim.is_kernel:
        return (f"{victim.instruction} = f32[4096,1024]{{1,0:T(8,128)}} fusion(%x.1), kind=kLoop, "
                "calls=%fused_computation")
    return (f"{victim.instruction}.1 = f32[4096,1024]{{1,0:T(8,128)}} custom-call(%x.1), "
            "custom_call_target=\"tpu_custom_call\", operand_layout_constraints={f32[4096,1024]{1,0}}, "
            f"frontend_attributes={{kernel_metadata={victim.metadata}}}")


def _op_name(victim: Victim) -> str:
    return f"{victim.program}/{victim.instruction}/pallas_call" if victim.is_kernel else f"{victim.program}/add"


def _size(size: int) -> str:
    """Bytes as the compiler writes them: "48.00M", "128.0K"."""
    return f"{size / MiB:.2f}M" if size >= MiB else f"{size / KiB:.1f}K"
