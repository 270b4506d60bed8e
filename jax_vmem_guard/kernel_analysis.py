"""What is worked out of a kernel's body once per process: what needs no memory, and the registers held at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from jax_vmem_guard.kernel_body import Op, read_body
from jax_vmem_guard.kernel_fold import fold
from jax_vmem_guard.mosaic import MosaicKernel, Ref
from jax_vmem_guard.scratch_use import alloca_chains, forwarded
from jax_vmem_guard.spills import HeldRegisters, held_by

_CACHED = 256

MEASURED_OPERATIONS = frozenset(
    ("scf.yield", "scf.if", "scf.for", "scf.while", "scf.condition", "copy", "tpu.iota", "tpu.matmul", "tpu.concatenate",
     "tpu.transpose", "tpu.bitcast", "tpu.dynamic_rotate", "tpu.rotate", "tpu.vector_store", "tpu.vector_load",
     "tpu.strided_load", "tpu.strided_store", "memref.load", "memref.store", "vector.load", "vector.store",
     "vector.broadcast", "vector.shape_cast", "vector.multi_reduction", "vector.extract_strided_slice",
     "vector.extract", "vector.transpose"))
"""Operations on vectors that occur in the measured kernels, with all of `arith` and `math`."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The body of one kernel.

    Attributes:
      ops: its operations, known branches and scopes taken in line.
      forwarded_scratch: positions of scratch operands that the compiler keeps in registers.
      alloca_chains: allocations that need memory, as in `Kernel.alloca_chains`.
      unmeasured: names of operations on vectors that no measured kernel has.
    """

    ops: tuple[Op, ...] = field(repr=False)
    forwarded_scratch: frozenset[int]
    alloca_chains: tuple[tuple[Ref, ...], ...]
    unmeasured: tuple[str, ...]


@lru_cache(maxsize=_CACHED)
def analyse(code: MosaicKernel) -> Analysis | None:
    """The analysis of a kernel's body, or None where it has a form that is not known here."""
    try:
        body = read_body(code.function)
        ops = fold(body, code.grid)
        first = len(body.arguments) - len(code.scratch)
        scratch = {
            id(body.arguments[first + i]): i for i, ref in enumerate(code.scratch) if ref.memory_space == "vmem"
        }
        gone = forwarded(ops, {value: code.scratch[i].shape for value, i in scratch.items()})
        return Analysis(
            ops=ops,
            forwarded_scratch=frozenset(i for value, i in scratch.items() if value in gone),
            alloca_chains=alloca_chains(body.ops, gone),
            unmeasured=tuple(sorted(_unmeasured(ops))),
        )
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return None


@lru_cache(maxsize=_CACHED)
def held_registers_of(code: MosaicKernel, generation: int) -> HeldRegisters | None:
    """Registers the body holds at once on a TPU generation, or None where that cannot be told."""
    analysis = analyse(code)
    if analysis is None:
        return None
    try:
        return held_by(analysis.ops, generation)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def _unmeasured(ops: tuple[Op, ...]) -> set[str]:
    found = set()
    for op in ops:
        takes_vectors = any(v.shape is not None for v in (*op.operands, *op.results))
        if takes_vectors and op.name not in MEASURED_OPERATIONS and not op.name.startswith(("arith.", "math.")):
            found.add(op.name)
        for block in op.blocks:
            found |= _unmeasured(block)
    return found
