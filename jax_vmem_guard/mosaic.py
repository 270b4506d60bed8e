"""Decodes the body of a TPU custom call: Mosaic bytecode in, a record of what the kernel declares out.

Pure reading: nothing here knows the program around the kernel. The same body is decoded once per process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.index_map import IndexMap, read_affine_map, read_index_map
from jax_vmem_guard.locks import ForkSafeLock

DYNAMIC = -(1 << 63)  # MLIR's mark of a size that is known only at run time


class UnreadableKernel(ValueError):
    """A custom call's body is not Mosaic code this JAX can read."""


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A memref of the kernel: a block of an operand, a scratch operand or an allocation in the body."""

    shape: tuple[int, ...]
    dtype: str
    memory_space: str


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """A kernel argument that stands for an operand or a result.

    Attributes:
      ref: the block as it lies in memory.
      pipelined: the argument has an index map: the grid moves it.
      synchronous: the kernel asks for one buffer.
      index_map: what the block index depends on; None where there is no index map.
    """

    ref: Ref
    pipelined: bool
    synchronous: bool
    index_map: IndexMap | None


@dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """What a kernel's own code declares.

    Attributes:
      name: name of its module or function.
      core: "tc" or "sc".
      ir_version: version of the stable Mosaic form it was shipped in; None for code shipped in another form.
      grid: iteration bounds, None for a dynamic one.
      prefetch: scalar prefetch operands.
      windows: operands and results that follow them.
      scratch: scratch operands.
      alloca_chains: allocations that live together, one tuple for each innermost scope that allocates.
      communicates: its code names another device or waits at a barrier.
      digest: SHA-256 of the code, as bytecode without locations.
      module: the decoded `ir.Module`; it must not be changed.
      function: the kernel's function in it.
    """

    name: str
    core: str
    ir_version: int | None
    grid: tuple[int | None, ...]
    prefetch: tuple[Ref, ...]
    windows: tuple[WindowSpec, ...]
    scratch: tuple[Ref, ...]
    alloca_chains: tuple[tuple[Ref, ...], ...]
    communicates: bool
    digest: str
    module: Any = field(repr=False, compare=False)
    function: Any = field(repr=False, compare=False)


_CACHE_SIZE = 256
_cache: OrderedDict[bytes, MosaicKernel] = OrderedDict()
_lock = ForkSafeLock()


def decode_kernel(body: str) -> MosaicKernel:
    """The kernel in a custom call's `body` (base64), decoded once per process.

    Raises:
      UnreadableKernel: where the body is no base64, no MLIR, has no function, or has a form not known here.
    """
    key = hashlib.sha256(body.encode()).digest()
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
        kernel = _decode(body)
        _cache[key] = kernel
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
        return kernel


def forget_kernels() -> None:
    """Empty the cache of decoded kernels (for measurements)."""
    with _lock:
        _cache.clear()


def _decode(body: str) -> MosaicKernel:
    try:
        code = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableKernel(f"the body is not base64: {error}") from error
    try:
        module = _jax.parse_mosaic(code)
    except _jax.IncompatibleJax:
        raise
    except Exception as error:  # MLIRError and RuntimeError alike, by jaxlib version
        raise UnreadableKernel(f"the body is not Mosaic code this JAX can read: {error}") from error
    functions = {
        _symbol(op): op for op in module.body.operations if op.operation.name == "func.func"
    }
    function = next((f for f in functions.values() if _is_entry(f)), next(iter(functions.values()), None))
    if function is None:
        raise UnreadableKernel("the Mosaic module has no function")
    try:
        return _read(module, function, functions, _ir_version(module))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UnreadableKernel(f"the Mosaic module has a form this version does not know: {error}") from error


def _read(module: Any, function: Any, functions: dict[str, Any], ir_version: int | None) -> MosaicKernel:
    ir = _jax.ir()
    attributes = function.attributes
    grid = tuple(None if b == DYNAMIC else b for b in _integers(attributes, "iteration_bounds"))
    arguments = list(function.regions[0].blocks[0].arguments)[len(grid):]
    refs = [read_ref(a.type) for a in arguments]
    n_prefetch = _integer(attributes, "scalar_prefetch")
    n_scratch = _integer(attributes, "scratch_operands")
    windows_end = len(refs) - n_scratch
    params = list(attributes["window_params"]) if "window_params" in attributes else []
    windows = []
    for position, ref in enumerate(refs[n_prefetch:windows_end]):
        param = ir.DictAttr(params[position]) if position < len(params) else {}
        index_map = None
        if "transform_indices" in param:
            index_map = _index_map(param["transform_indices"], functions, grid)
        windows.append(WindowSpec(
            ref=ref,
            pipelined="transform_indices" in param or "window_bounds" in param,
            synchronous="pipeline_mode" in param and "synchronous" in str(param["pipeline_mode"]),
            index_map=index_map,
        ))
    allocates, communicates = _look_through(module)
    name = _module_name(module)
    return MosaicKernel(
        name=name if name is not None else _symbol(function),
        core="sc" if "sc_" in _text(attributes, "tpu.core_type") else "tc",
        ir_version=ir_version,
        grid=grid,
        prefetch=tuple(refs[:n_prefetch]),
        windows=tuple(windows),
        scratch=tuple(refs[windows_end:]),
        alloca_chains=tuple(_alloca_chains(function.regions[0], ())) if allocates else (),
        communicates=communicates,
        digest=hashlib.sha256(_jax.mosaic_bytecode(module)).hexdigest(),
        module=module,
        function=function,
    )


def index_map_code(kernel: MosaicKernel, position: int) -> str | None:
    """The code of the index map of the window at `position`, its name left out; None where it has none.

    Two windows with the same code and block shape are at the same place of their arrays in every grid step.
    """
    ir = _jax.ir()
    attributes = kernel.function.attributes
    params = list(attributes["window_params"]) if "window_params" in attributes else []
    param = ir.DictAttr(params[position]) if position < len(params) else {}
    if "transform_indices" not in param:
        return None
    text = str(param["transform_indices"])
    if text.startswith("affine_map<"):
        return text
    name = ir.FlatSymbolRefAttr(param["transform_indices"]).value
    transform = next((op for op in kernel.module.body.operations if _symbol(op) == name), None)
    return None if transform is None else "".join(str(block) for block in transform.regions[0].blocks)


def _index_map(attribute: Any, functions: dict[str, Any], grid: tuple[int | None, ...]) -> IndexMap | None:
    """An index map is the name of a function, or an affine map (kernels made by `pl.kernel`, jax 0.10.2 to 0.12.0)."""
    text = str(attribute)
    if text.startswith("affine_map<"):
        return read_affine_map(text, grid)
    function = functions.get(_jax.ir().FlatSymbolRefAttr(attribute).value)
    return read_index_map(function, grid) if function is not None else None


def read_ref(type_: Any) -> Ref:
    """The record of an MLIR memref type; anything else has memory space "none"."""
    ir = _jax.ir()
    try:
        memref = ir.MemRefType(type_)
    except (ValueError, TypeError):
        return Ref(shape=(), dtype=str(type_), memory_space="none")
    return Ref(shape=tuple(memref.shape), dtype=str(memref.element_type), memory_space=_space(str(memref.memory_space)))


def ref_of_text(text: str) -> Ref:
    """The same from the type as MLIR prints it: "memref<256x512xf32, #tpu.memory_space<vmem>>"."""
    memref = re.match(r"memref<((?:[\d?]+x)*)([^,>]+)", text)
    if memref is None:
        return Ref(shape=(), dtype=text, memory_space="none")
    shape = tuple(DYNAMIC if d == "?" else int(d) for d in memref.group(1).split("x") if d)
    return Ref(shape=shape, dtype=memref.group(2), memory_space=_space(text))


def _space(text: str) -> str:
    found = re.search(r"memory_space<(\w+)>", text)
    word = found.group(1) if found else "any"
    return "semaphore" if word == "semaphore_mem" else word


def _alloca_chains(region: Any, outer: tuple[Ref, ...]) -> list[tuple[Ref, ...]]:
    """Allocations that live at the same time: those of a scope with those of the scopes around it."""
    own: list[Ref] = []
    inner: list[Any] = []
    for block in region.blocks:
        for op in block.operations:
            if op.operation.name == "memref.alloca":
                own.append(read_ref(op.operation.results[0].type))
            inner.extend(op.operation.regions)
    here = outer + tuple(own)
    chains = [chain for r in inner for chain in _alloca_chains(r, here)]
    return chains if chains else [here] if own else []


_BARRIERS = ("tpu.sem_barrier", "tpu.get_barrier_semaphore")
_LOCAL_OPERANDS = {"tpu.enqueue_dma": 3, "tpu.sem_signal": 2}  # more than these may name a device


def _look_through(module: Any) -> tuple[bool, bool]:
    """Whether the code allocates memory, and whether it addresses other devices.

    It does by a device id on a DMA or signal, or by the global barrier.
    """
    ir = _jax.ir()
    found = {"allocates": False, "communicates": False}

    def visit(op: Any) -> Any:
        name = op.name
        if name == "memref.alloca":
            found["allocates"] = True
        elif name in _BARRIERS:
            found["communicates"] = True
        elif name in _LOCAL_OPERANDS and not found["communicates"] and len(op.operands) > _LOCAL_OPERANDS[name]:
            found["communicates"] = "device_id" in str(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found["allocates"], found["communicates"]


def _text(attributes: Any, name: str) -> str:
    return str(attributes[name]) if name in attributes else ""


def _is_entry(function: Any) -> bool:
    return any(name in function.attributes for name in ("scalar_prefetch", "dimension_semantics", "iteration_bounds"))


def _ir_version(module: Any) -> int | None:
    attributes = module.operation.attributes
    if "stable_mosaic.version" not in attributes:
        return None
    return int(_jax.ir().IntegerAttr(attributes["stable_mosaic.version"]).value)


def _symbol(op: Any) -> str:
    return str(_jax.ir().StringAttr(op.attributes["sym_name"]).value)


def _module_name(module: Any) -> str | None:
    attributes = module.operation.attributes
    return str(_jax.ir().StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else None


def _integer(attributes: Any, name: str) -> int:
    return int(_jax.ir().IntegerAttr(attributes[name]).value) if name in attributes else 0


def _integers(attributes: Any, name: str) -> tuple[int, ...]:
    return tuple(_jax.ir().DenseI64ArrayAttr(attributes[name])) if name in attributes else ()
