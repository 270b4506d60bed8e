"""Compiles one lowered program under the guard and turns what comes of it into rows, one per kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, MiB
from jax_vmem_guard.diagnosis import Diagnosis, diagnose
from jax_vmem_guard.explain import explain
from jax_vmem_guard.footprint import Footprint, footprint
from jax_vmem_guard.journal import Repair, repairs
from jax_vmem_guard.kernels import Kernel, kernel_from_config, read_kernels
from jax_vmem_guard.planner import flag_bytes, limit_in_force
from jax_vmem_guard.report_rows import BUFFERS, from_here, item_of
from jax_vmem_guard.rows import ERROR, FAILS, FITS, REPAIRED, UNKNOWN, Row
from jax_vmem_guard.stand_in import Topology
from jax_vmem_guard.used_vmem import InstructionVmem, used_scoped_vmem


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of compiling one program for one topology.

    Attributes:
      program: its name.
      rows: one per kernel; one for the program where it failed for a reason that is no kernel's.
      executable: JAX's executable, or None where it did not compile. It cannot run: its chips are not here.
      error: what the compiler raised, with the guard's notes, or None.
      repair: what the guard changed, or None.
      module: the StableHLO module before any repair, or None where it was not lowered.
    """

    program: str
    rows: tuple[Row, ...]
    module: Any = None
    executable: Any = None
    error: BaseException | None = None
    repair: Repair | None = None


def judge(computation: Any, topology: Topology, *, program: str,
          compiler_options: dict[str, Any] | None = None) -> Judgement:
    """Compile a program that was lowered for a topology.

    Kernels are labelled first, so that both the compiler's errors and its report of used VMEM name them for certain.

    Args:
      computation: the lowered program (`pxla.MeshComputation`); it is not touched.
      topology: what it was lowered for.
      program: its name in the rows.
      compiler_options: as for `jax.stages.Lowered.compile`.
    """
    module = computation.stablehlo()
    kernels = read_kernels(module)
    labelled = _jax.with_module(computation, custom_call.label(module))
    before = len(repairs())  # a repair is recorded before `compile()` returns
    try:
        with _jax.past_the_compilation_cache():
            executable = labelled.compile(compiler_options)
    except Exception as error:
        return Judgement(program=program, error=error, module=module,
                         rows=_failed(kernels, topology, program, error))
    name = str(getattr(computation, "_name", program))
    repair = next((made for made in repairs()[before:] if made.program == name), None)
    rows = _compiled(kernels, topology, program, executable, repair)
    return Judgement(program=program, executable=executable, repair=repair, rows=rows, module=module)


def did_not_lower(error: BaseException, topology: Topology, *, program: str) -> Judgement:
    """The judgement of a program that could not even be lowered for the topology."""
    return Judgement(program=program, error=error, rows=(_program_row(error, topology, program),))


def _compiled(kernels: tuple[Kernel, ...], topology: Topology, program: str, executable: Any,
              repair: Repair | None) -> tuple[Row, ...]:
    instructions = used_scoped_vmem(executable)
    used: dict[int, InstructionVmem] = {}
    for instruction in instructions:
        ordinal = _ordinal(instruction.label)
        # The same kernel can be compiled into several instructions: the largest decides.
        if ordinal is not None and (ordinal not in used or instruction.used_bytes > used[ordinal].used_bytes):
            used[ordinal] = instruction
    changes = _changes_by_kernel(repair)
    options = tuple(change for change in (repair.changes if repair else ()) if change.remedy == "compile_limit")
    rows = []
    for kernel in kernels:
        found = used.get(kernel.ordinal)
        made = changes.get(kernel.fingerprint, ())
        limit = found.limit_bytes if found is not None and found.limit_bytes else _limit(kernel, topology.chip)
        rows.append(_row(kernel, topology, program, verdict=REPAIRED if made else FITS, limit=limit,
                         need=0 if found is None else found.used_bytes, measured=found is not None, changes=made,
                         reason=None if found is not None else _unseen(kernel, made), compiled=_as_compiled(found)))
    rows += [_change_row(change, topology, program) for change in options]
    return tuple(rows) or (_without_kernels(instructions, topology, program),)


def _as_compiled(instruction: InstructionVmem | None) -> Kernel | None:
    """The kernel as it was compiled, changes included; None where its code cannot be read there."""
    if instruction is None:
        return None
    kernel = kernel_from_config(instruction.config, ordinal=0, name="", source=None, operands=instruction.operands,
                                results=instruction.results)
    return kernel if kernel.readable else None


def _failed(kernels: tuple[Kernel, ...], topology: Topology, program: str, error: BaseException) -> tuple[Row, ...]:
    diagnosis = diagnose(error)
    if diagnosis is None:
        return (_program_row(error, topology, program),)
    guilty = _guilty(diagnosis, kernels)
    rows = []
    for kernel in kernels:
        if kernel.fingerprint in guilty:
            rows.append(_row(kernel, topology, program, verdict=FAILS, limit=_limit(kernel, topology.chip),
                             need=_most(diagnosis.size_bytes, footprint(kernel, topology.chip).certain_bytes),
                             measured=False, reason=_reason(error, diagnosis, topology.chip)))
        else:
            rows.append(_row(kernel, topology, program, verdict=UNKNOWN, limit=_limit(kernel, topology.chip),
                             need=None, measured=False, reason="the program failed at another instruction"))
    if not guilty:
        rows.append(Row(program=program, kernel=diagnosis.instruction or program, source=diagnosis.source,
                        topology=topology.name, chip=topology.chip.name, verdict=FAILS,
                        need_bytes=diagnosis.size_bytes, limit_bytes=diagnosis.limit_bytes,
                        capacity_bytes=topology.chip.capacity_bytes, reason=_reason(error, diagnosis, topology.chip)))
    return tuple(rows)


def _guilty(diagnosis: Diagnosis, kernels: tuple[Kernel, ...]) -> set[str]:
    """Fingerprints of the kernels that failed: those whose label the message has, or the only one there is."""
    ordinals = {_ordinal(label) for label in custom_call.labels_in(diagnosis.label or "")}
    named = {kernel.fingerprint for kernel in kernels if kernel.ordinal in ordinals}
    if not named and len({kernel.fingerprint for kernel in kernels}) == 1 and diagnosis.is_kernel is not False:
        return {kernels[0].fingerprint}
    return named


def _ordinal(label: str | None) -> int | None:
    """The kernel's ordinal in a label that `custom_call.label` gave ("k7" -> 7), or None."""
    return int(label[1:]) if label and label[:1] == "k" and label[1:].isdigit() else None


def _row(kernel: Kernel, topology: Topology, program: str, *, verdict: str, need: int | None, measured: bool,
         limit: int | None, reason: str | None = None, changes: tuple[Change, ...] = (),
         compiled: Kernel | None = None) -> Row:
    parts = footprint(compiled or kernel, topology.chip)
    if need is None:
        need = parts.expected_bytes or None
    windows, scratch, body, spills = _split(parts, need or 0)
    return Row(
        program=program, kernel=kernel.name, source=from_here(kernel.called_from or kernel.source), topology=topology.name,
        chip=topology.chip.name, verdict=verdict, need_bytes=need, measured=measured, limit_bytes=limit,
        capacity_bytes=topology.chip.capacity_bytes, windows_bytes=windows, scratch_bytes=scratch, body_bytes=body,
        spills_bytes=spills, reason=reason, changes=tuple(f"{c.before} -> {c.after}" for c in changes),
        edit="\n".join(dict.fromkeys(c.edit for c in changes if c.edit)) or None,
        items=tuple(item_of(item) for item in parts.items if item.kind in BUFFERS))


def _split(parts: Footprint, need: int) -> tuple[int, int, int, int]:
    """Windows, scratch, allocations and the rest of a need.

    Where the compiler used less than the parts add up to (it placed operands in VMEM itself, or a change made blocks
    smaller), the windows are what is left.
    """
    body = min(parts.alloca_bytes, need)
    scratch = min(parts.scratch_bytes, need - body)
    windows = min(parts.window_bytes, need - body - scratch)
    return windows, scratch, body, need - body - scratch - windows


def _limit(kernel: Kernel, chip: Chip) -> int:
    return limit_in_force(kernel, chip=chip, flag_bytes=flag_bytes({}, ""))


def _most(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _unseen(kernel: Kernel, changes: tuple[Change, ...]) -> str:
    """Why a kernel of the lowered program is not in the compiled one."""
    if any(change.remedy == "fallback" for change in changes):
        return "the declared fallback runs in its place: no kernel, no scoped VMEM"
    if kernel.core != "tc":
        return "runs on the SparseCore, which has memory of its own"
    return "is not in the compiled program: nothing needs its results, or another kernel took its place"


def _changes_by_kernel(repair: Repair | None) -> Mapping[str, tuple[Change, ...]]:
    changes: dict[str, tuple[Change, ...]] = {}
    for change in repair.changes if repair else ():
        changes[change.fingerprint] = (*changes.get(change.fingerprint, ()), change)
    return changes


def _change_row(change: Change, topology: Topology, program: str) -> Row:
    """A change that is no kernel's: the limit of the whole compile."""
    return Row(program=program, kernel=change.kernel, source=change.source, topology=topology.name,
               chip=topology.chip.name, verdict=REPAIRED, need_bytes=change.need_bytes, measured=True,
               capacity_bytes=topology.chip.capacity_bytes, edit=change.edit,
               changes=(f"{change.before} -> {change.after}",))


def _without_kernels(instructions: tuple[InstructionVmem, ...], topology: Topology, program: str) -> Row:
    """A program that holds no kernel: the instruction that uses most."""
    most = max(instructions, key=lambda row: row.used_bytes, default=None)
    return Row(program=program, kernel="(no TPU kernel)", topology=topology.name, chip=topology.chip.name, verdict=FITS,
               need_bytes=0 if most is None else most.used_bytes, measured=True,
               limit_bytes=None if most is None else most.limit_bytes, capacity_bytes=topology.chip.capacity_bytes,
               reason=None if most is None else f"largest instruction: {most.name}")


def _program_row(error: BaseException, topology: Topology, program: str) -> Row:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
    return Row(program=program, kernel=program, topology=topology.name, chip=topology.chip.name, verdict=ERROR,
               capacity_bytes=topology.chip.capacity_bytes, reason=reason)


def _reason(error: BaseException, diagnosis: Diagnosis, chip: Chip) -> str:
    """The guard's own note, where the error has one; else the diagnosis in words."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith("jax_vmem_guard:"):
            return note.removeprefix("jax_vmem_guard:").strip()
    size = "" if diagnosis.size_bytes is None else f" ({diagnosis.size_bytes / MiB:.2f} MiB)"
    return explain(diagnosis, chip) + size
