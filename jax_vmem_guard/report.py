"""`inspect`: the kernels of a lowered or compiled program, what each needs in scoped VMEM, and what it may have."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.chips import Chip, chip_for_device_kind, chip_named
from jax_vmem_guard.footprint import Footprint, Item, footprint
from jax_vmem_guard.kernels import Kernel, kernel_from_config, read_kernels
from jax_vmem_guard.report_text import instruction_table, kernel_table, mib, render
from jax_vmem_guard.used_vmem import InstructionVmem, used_scoped_vmem


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel of a program on one chip. Sizes are bytes; what is unknown is None.

    Attributes:
      name, source, called_from, core, grid: as in `Kernel`.
      instruction: HLO instruction that runs it, in a compiled program.
      chip: short name of the chip.
      windows, scratch, allocas: its buffers in VMEM.
      window_bytes, scratch_bytes, alloca_bytes: their sums (allocations: the most that live together).
      spill_bytes: spill slots the compiler is expected to add.
      certain_bytes: never above the need; expected_bytes: the likely need; at_most_bytes: covers it.
      used_bytes: what the compiler used (compiled programs).
      limit_bytes: the limit in force; own_limit: the kernel sets it itself.
      capacity_bytes: the most the chip can give one kernel.
      fits: True or False where that is sure, else None.
      unknown: why the need can differ from what is written here.
      advice: the changes that would shrink the need most, in words.
    """

    name: str
    source: str | None
    called_from: str | None
    core: str
    grid: tuple[int | None, ...]
    instruction: str | None
    chip: str
    windows: tuple[Item, ...]
    scratch: tuple[Item, ...]
    allocas: tuple[Item, ...]
    window_bytes: int
    scratch_bytes: int
    alloca_bytes: int
    spill_bytes: int
    certain_bytes: int
    expected_bytes: int
    at_most_bytes: int
    used_bytes: int | None
    limit_bytes: int
    own_limit: bool
    capacity_bytes: int
    fits: bool | None
    unknown: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def need_bytes(self) -> int:
        """What was used, or where nothing was compiled what is expected."""
        return self.used_bytes if self.used_bytes is not None else self.expected_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the limit leaves; negative where the need is more."""
        return self.limit_bytes - self.need_bytes


@dataclass(frozen=True, kw_only=True)
class InstructionReport:
    """One HLO instruction of a compiled program that uses scoped VMEM, in bytes."""

    name: str
    opcode: str
    is_kernel: bool
    used_bytes: int
    limit_bytes: int
    headroom_bytes: int
    op_name: str
    source: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The kernels of one program. Prints as a table.

    Attributes:
      chip: short name of the chip the program is for.
      kernels: one row each, in program order.
      instructions: every HLO instruction with scoped VMEM, kernels included (compiled programs; else empty).
    """

    chip: str
    kernels: tuple[KernelReport, ...]
    instructions: tuple[InstructionReport, ...] = ()

    @property
    def fits(self) -> bool | None:
        """True where every kernel is sure to fit, False where one is sure not to, else None."""
        verdicts = [kernel.fits for kernel in self.kernels]
        return False if False in verdicts else None if None in verdicts else True

    def to_json(self) -> str:
        """The report as JSON: the fields of the records, and `fits`, `headroom_bytes` besides."""
        return json.dumps({
            "chip": self.chip,
            "fits": self.fits,
            "kernels": [dataclasses.asdict(k) | {"headroom_bytes": k.headroom_bytes} for k in self.kernels],
            "instructions": [dataclasses.asdict(i) for i in self.instructions],
        })

    def to_html(self) -> str:
        """The report as one self-contained page: a bar per kernel against its limit and the chip."""
        from jax_vmem_guard.report_rows import to_html

        return to_html(self)

    def _repr_html_(self) -> str:
        from jax_vmem_guard.report_rows import notebook_html

        return notebook_html(self.to_html(), len(self.kernels))

    def __str__(self) -> str:
        tables = [kernel_table(self)] if self.kernels else []
        if self.instructions:
            tables.append(instruction_table(self))
        return render(tables) if tables else f"No TPU kernel in this program ({self.chip})."


def inspect(program: Any, *, chip: str | None = None, topology: str | None = None,
            default_limit_bytes: int | None = None) -> Report:
    """What the kernels of a program need in scoped VMEM, their limits, and whether they fit.

    Args:
      program: what `jax.jit(f).lower(...)` gives, or `.compile()` of that, or StableHLO: an MLIR module, text or bytecode.
      chip: chip the program is for ("v5e", or a device kind); needed for StableHLO, which does not say.
      topology: the same by a topology's name ("v5e:2x2").
      default_limit_bytes: limit of kernels that set none, where a flag changes the chip's own.

    Raises:
      ValueError: the chip is not known; the message lists those that are.
      TypeError: `program` is none of these.
    """
    on = _chip(program, chip or topology)
    limit = default_limit_bytes if default_limit_bytes is not None else on.default_limit_bytes
    if hasattr(program, "runtime_executable"):
        return _of_compiled(used_scoped_vmem(program), on, limit)
    if hasattr(program, "_lowering"):
        module = _jax.stablehlo_of_lowered(program)
    elif isinstance(program, (str, bytes)) or hasattr(program, "operation"):
        module = program
    else:
        raise TypeError(
            f"`inspect` takes what `.lower()` or `.compile()` of a jitted function gives, or a StableHLO module as MLIR, "
            f"text or bytecode; got {type(program).__name__}. For a function use "
            "`jax_vmem_guard.check(fun, *args, topology=...)`.")
    return Report(chip=on.name, kernels=tuple(_row(k, on, limit, None) for k in read_kernels(module)))


def _of_compiled(rows: tuple[InstructionVmem, ...], chip: Chip, limit: int) -> Report:
    kernels = []
    for ordinal, row in enumerate(row for row in rows if row.is_kernel):
        kernel = kernel_from_config(
            row.config, ordinal=ordinal, name="", source=row.source, operands=row.operands, results=row.results)
        if not kernel.readable:
            kernel = dataclasses.replace(kernel, name=row.kernel or row.name)
        kernels.append(_row(kernel, chip, limit, row))
    instructions = tuple(
        InstructionReport(
            name=row.name, opcode=row.opcode, is_kernel=row.is_kernel, used_bytes=row.used_bytes,
            limit_bytes=row.limit_bytes or limit, headroom_bytes=(row.limit_bytes or limit) - row.used_bytes,
            op_name=row.op_name, source=row.source)
        for row in rows)
    return Report(chip=chip.name, kernels=tuple(kernels), instructions=instructions)


def _chip(program: Any, name: str | None) -> Chip:
    if name is not None:
        return chip_named(name)
    kind = _jax.device_kind_of(program)
    chip = chip_for_device_kind(kind) if kind is not None else None
    if chip is None:
        said = f"the program is for {kind!r}" if kind else "the program does not say which chip it is for"
        raise ValueError(f"{said}: pass `chip=`, for example `chip=\"v5e\"`, or `topology=\"v5e:2x2\"`.")
    return chip


def _row(kernel: Kernel, chip: Chip, default_limit: int, compiled: InstructionVmem | None) -> KernelReport:
    own = compiled.limit_bytes if compiled is not None else kernel.limit_bytes
    limit = min(own if own is not None else default_limit, chip.capacity_bytes)
    need = footprint(kernel, chip, limit)
    return KernelReport(
        name=kernel.name, source=kernel.source, called_from=kernel.called_from, core=kernel.core, grid=kernel.grid,
        instruction=compiled.name if compiled else None, chip=chip.name,
        windows=_items(need, "window"), scratch=_items(need, "scratch"), allocas=_items(need, "alloca"),
        window_bytes=need.window_bytes, scratch_bytes=need.scratch_bytes, alloca_bytes=need.alloca_bytes,
        spill_bytes=need.spill_bytes,
        certain_bytes=need.certain_bytes, expected_bytes=need.expected_bytes, at_most_bytes=need.at_most_bytes,
        used_bytes=compiled.used_bytes if compiled else None, limit_bytes=limit, own_limit=own is not None,
        capacity_bytes=chip.capacity_bytes, fits=_fits(kernel, need, limit, compiled), unknown=need.unknown,
        advice=_advice(kernel, need),
    )


def _fits(kernel: Kernel, need: Footprint, limit: int, compiled: InstructionVmem | None) -> bool | None:
    if compiled is not None or kernel.core != "tc":
        return True
    if need.certain_bytes > limit:
        return False
    return True if need.at_most_bytes <= limit and not need.unknown else None


def _items(need: Footprint, kind: str) -> tuple[Item, ...]:
    return tuple(sorted((i for i in need.items if i.kind == kind), key=lambda item: item.position))


def _advice(kernel: Kernel, need: Footprint) -> tuple[str, ...]:
    """Up to three changes to the largest buffers, each with the bytes it would give back."""
    advice = []
    double = {window.operand for window in kernel.windows if window.buffers == 2}
    for item in need.items[:3]:
        if item.kind == "spills":
            advice.append(f"smaller blocks hold fewer values at once: {mib(item.bytes)} MiB are spill slots")
            continue
        what = f"{item.kind} {item.position}" if item.kind != "window" else f"{item.role} {item.position}"
        what += f" ({item.dtype}[{', '.join(map(str, item.shape))}])"
        change = f"half the block of {what}" if item.kind == "window" else f"half of {what}"
        if item.kind == "window" and item.position in double:
            change += ", or one buffer for it (pipeline_mode=pl.Buffered(1)),"
        advice.append(f"{change} gives back {mib(item.bytes // 2)} MiB")
    return tuple(advice)
