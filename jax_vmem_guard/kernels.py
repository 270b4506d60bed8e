"""Reads the TPU kernels out of a lowered program: every `tpu_custom_call` of its StableHLO becomes a `Kernel`."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.custom_call import TARGETS, aliases, custom_calls, read_config
from jax_vmem_guard.mosaic import MosaicKernel, Ref, UnreadableKernel, decode_kernel

VMEM_CONFIG = 1  # number of VMEM in `scoped_memory_configs`; the same number is its memory space color


@dataclass(frozen=True, kw_only=True)
class Window:
    """One operand or result of a kernel, as the kernel sees it.

    Its bytes depend on the chip: `footprint.block_bytes(window, chip)`.

    Attributes:
      operand: position among the custom call's operands, the bounds of a dynamic grid and scalar prefetch included;
        results are counted on after the last operand.
      role: "prefetch", "input" or "output".
      array_shape: shape of the whole array (per device, as the custom call takes it).
      block_shape: shape of the block in memory; a squeezed dimension is 1.
      dtype: element type in MLIR's short form: "bf16", "f32", "i8".
      memory_space: "vmem", "smem", "any", "hbm", "semaphore".
      buffers: how many blocks are resident: 1 or 2; 0 where nothing is in VMEM.
      synchronous: the kernel asked for single buffering (`pl.Buffered(1)` or a constant index map).
      constant_index: the index map is provably the same in every grid step.
      varies_with: grid axes (positions) the block index depends on; None where there is no index map.
      data_dependent: the index map reads prefetched scalars.
    """

    operand: int
    role: str
    array_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: str
    memory_space: str
    buffers: int
    synchronous: bool = False
    constant_index: bool = False
    varies_with: tuple[int, ...] | None = None
    data_dependent: bool = False


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One custom call of a lowered program that runs on a TPU core.

    Attributes:
      ordinal: position among the module's TPU custom calls, in walk order.
      fingerprint: hex digest of the kernel's own code with locations removed, operand and result types and layouts,
        and of what the custom call asks for (colors, aliases, flags), but not of its limit.
      name: kernel name, as Pallas gave it.
      source: "file:line" of the `pallas_call`; None where the module has no locations.
      called_from: "file:line" of the innermost frame outside of installed packages; None if there is none.
      core: "tc" (TensorCore) or "sc" (SparseCore).
      grid: iteration bounds; None stands for a dynamic bound.
      windows: operands and results.
      scratch: scratch operands, semaphores and SMEM included.
      alloca_chains: allocations in the body (`run_scoped`, `emit_pipeline`) that live at the same time, one tuple for
        each innermost scope that allocates.
      limit_bytes: the limit the kernel sets itself (`vmem_limit_bytes`); None where it follows the default.
      input_colors / output_colors: memory space XLA must place an operand / result in: position -> color (1 is VMEM).
      aliases: (output, input) pairs.
      allow_input_fusion: operands XLA may fuse their producer into.
      communicates: the kernel talks to other devices (collective id, remote DMA, barrier): it cannot run alone.
      target: custom call target, "tpu_custom_call".
      readable: the kernel's Mosaic module could be decoded; where False, windows and scratch are empty.
      ir_version: version of the stable Mosaic form; None where it is in no such form.
      code: the decoded Mosaic code, for those who read the body; None where not readable. Not part of equality.
    """

    ordinal: int
    fingerprint: str
    name: str
    source: str | None
    called_from: str | None = None
    core: str
    grid: tuple[int | None, ...]
    windows: tuple[Window, ...]
    scratch: tuple[Ref, ...]
    alloca_chains: tuple[tuple[Ref, ...], ...] = ()
    limit_bytes: int | None
    input_colors: dict[int, int] = field(default_factory=dict, hash=False)
    output_colors: dict[int, int] = field(default_factory=dict, hash=False)
    aliases: tuple[tuple[int, int], ...] = ()
    allow_input_fusion: tuple[bool, ...] = ()
    communicates: bool = False
    target: str = TARGETS[0]
    readable: bool = True
    ir_version: int | None = None
    code: MosaicKernel | None = field(default=None, compare=False, repr=False)


def read_kernels(module: Any) -> tuple[Kernel, ...]:
    """The kernels of a StableHLO module, in walk order.

    Custom calls inside functions, loops, branches and `shard_map` bodies are found; a function called twice holds its
    kernels once. A custom call that cannot be decoded gives a record with `readable=False`.

    Args:
      module: an MLIR `ir.Module`, or StableHLO text or bytecode.
    """
    if isinstance(module, (str, bytes)):
        module = _jax.parse_stablehlo(module)
    calls = custom_calls(module)
    if not calls:
        return ()
    callers = _callers(module)
    return tuple(_read_call(op, ordinal, _frames_above(_function_of(op), callers)) for ordinal, op in enumerate(calls))


def kernel_from_config(
    config: dict[str, Any], *, ordinal: int, name: str, source: str | None, operands: tuple[tuple[int, ...], ...],
    results: tuple[tuple[int, ...], ...],
) -> Kernel:
    """The kernel of a compiled program, from the backend config of its HLO instruction.

    Types are not known there beyond shapes, so its fingerprint is not the one of the lowered program.
    """
    return _record(config, ordinal=ordinal, name=name, frames=(source,) if source else (), operands=operands,
                   results=results, aliasing=(), types=(operands, results))


def _read_call(op: Any, ordinal: int, outer_frames: tuple[str, ...]) -> Kernel:
    try:
        config = read_config(op)
    except (ValueError, TypeError):
        config = {}
    return _record(
        config,
        ordinal=ordinal,
        name=str(_jax.ir().StringAttr(op.attributes["kernel_name"]).value) if "kernel_name" in op.attributes else "",
        frames=_frames(op.location) + outer_frames,
        operands=tuple(_array_shape(v.type) for v in op.operands),
        results=tuple(_array_shape(v.type) for v in op.results),
        aliasing=tuple((result, operand) for operand, result in aliases(op).items()),
        types=([str(v.type) for v in op.operands], [str(v.type) for v in op.results],
               [str(op.attributes[a]) for a in ("operand_layouts", "result_layouts") if a in op.attributes]),
    )


def _record(
    config: dict[str, Any], *, ordinal: int, name: str, frames: tuple[str, ...],
    operands: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...],
    aliasing: tuple[tuple[int, int], ...], types: Any,
) -> Kernel:
    call = config.get("custom_call_config")
    call = call if isinstance(call, dict) else {}
    try:
        code = decode_kernel(call.get("body", ""))
    except UnreadableKernel:
        code = None
    in_colors = {int(c.get("operand_index", 0)): int(c["color"]) for c in call.get("input_memory_space_colors", ())}
    out_colors = {
        int((c.get("shape_index") or [0])[0]): int(c["color"]) for c in call.get("output_memory_space_colors", ())
    }
    # jax 0.8 and 0.9 write one number for each result, -1 for none.
    out_colors |= {i: int(c) for i, c in enumerate(call.get("output_memory_colors", ())) if int(c) >= 0}
    return Kernel(
        ordinal=ordinal,
        fingerprint=_fingerprint(config, call, code, aliasing, types),
        name=name or (code.name if code else TARGETS[0]),
        source=next((f for f in frames if not _is_jax_machinery(f)), None),
        called_from=next((f for f in frames if not _is_installed(f)), None),
        core="sc" if "SPARSECORE" in str(config.get("device_type", "")) or (code and code.core == "sc") else "tc",
        grid=code.grid if code else (),
        windows=_windows(code, operands, results) if code else (),
        scratch=code.scratch if code else (),
        alloca_chains=code.alloca_chains if code else (),
        limit_bytes=_limit(config),
        input_colors=in_colors,
        output_colors=out_colors,
        aliases=aliasing,
        allow_input_fusion=tuple(bool(x) for x in call.get("allow_input_fusion", ())),
        communicates=bool(
            call.get("has_communication") or call.get("collective_id") is not None or (code and code.communicates)
        ),
        readable=code is not None,
        ir_version=code.ir_version if code else None,
        code=code,
    )


def _windows(
    code: MosaicKernel, operands: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...]
) -> tuple[Window, ...]:
    first = sum(bound is None for bound in code.grid)  # the bounds of a dynamic grid are the first operands
    arrays = (*operands, *results)
    one_step = code.grid != () and all(bound == 1 for bound in code.grid)
    windows = [
        Window(operand=i, role="prefetch", array_shape=ref.shape, block_shape=ref.shape, dtype=ref.dtype,
               memory_space=ref.memory_space, buffers=1 if ref.memory_space == "vmem" else 0)
        for i, ref in enumerate(code.prefetch, start=first)
    ]
    for i, spec in enumerate(code.windows, start=first + len(code.prefetch)):
        constant = spec.index_map is not None and spec.index_map.constant
        single = not spec.pipelined or not code.grid or one_step or spec.synchronous or constant
        windows.append(Window(
            operand=i,
            role="input" if i < len(operands) else "output",
            array_shape=arrays[i] if i < len(arrays) else spec.ref.shape,
            block_shape=spec.ref.shape,
            dtype=spec.ref.dtype,
            memory_space=spec.ref.memory_space,
            buffers=0 if spec.ref.memory_space != "vmem" else 1 if single else 2,
            synchronous=spec.synchronous,
            constant_index=constant,
            varies_with=spec.index_map.axes if spec.index_map else None,
            data_dependent=spec.index_map is not None and spec.index_map.reads_memory,
        ))
    return tuple(windows)


def _array_shape(type_: Any) -> tuple[int, ...]:
    try:
        return tuple(_jax.ir().RankedTensorType(type_).shape)
    except (ValueError, TypeError):
        return ()


def _limit(config: dict[str, Any]) -> int | None:
    for entry in config.get("scoped_memory_configs") or ():
        if int(entry.get("memory_space", 0)) == VMEM_CONFIG:
            return int(entry["size"])
    return None


_NOT_IN_FINGERPRINT = ("body", "debug_locations", "cost_estimate")


def _fingerprint(
    config: dict[str, Any], call: dict[str, Any], code: MosaicKernel | None, aliasing: tuple[tuple[int, int], ...],
    types: Any,
) -> str:
    parts = {
        "code": code.digest if code else hashlib.sha256(str(call.get("body", config)).encode()).hexdigest(),
        "types": types,
        "aliases": aliasing,
        "call": {k: v for k, v in call.items() if k not in _NOT_IN_FINGERPRINT},
        "config": {k: v for k, v in config.items() if k not in ("custom_call_config", "scoped_memory_configs")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---- source lines


_FRAME = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+')


def _frames(location: Any) -> tuple[str, ...]:
    """ "file:line" of each frame of a location, innermost first."""
    return tuple(f"{file}:{line}" for file, line in _FRAME.findall(str(location)))


def _callers(module: Any) -> dict[str, tuple[str, Any]]:
    """Function -> (function that calls it first, location of that call)."""
    ir = _jax.ir()
    found: dict[str, tuple[str, Any]] = {}

    def visit(op: Any) -> Any:
        if op.name in ("func.call", "call"):
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            found.setdefault(callee, (_function_of(op), op.location))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _function_of(op: Any) -> str:
    while op is not None and op.name != "func.func":
        op = op.parent.operation if op.parent is not None else None
    return str(_jax.ir().StringAttr(op.attributes["sym_name"]).value) if op is not None else ""


def _frames_above(function: str, callers: dict[str, tuple[str, Any]]) -> tuple[str, ...]:
    """Frames of the calls that lead to a function, outwards."""
    frames: tuple[str, ...] = ()
    seen: set[str] = set()
    while function in callers and function not in seen:
        seen.add(function)
        function, location = callers[function]
        frames += _frames(location)
    return frames


def _is_jax_machinery(frame: str) -> bool:
    path = frame.replace("\\", "/")
    return "/jax/_src/" in path or "/jax_vmem_guard/" in path


def _is_installed(frame: str) -> bool:
    path = frame.replace("\\", "/")
    return "/site-packages/" in path or "/dist-packages/" in path or _is_jax_machinery(frame) or frame.startswith("<")
