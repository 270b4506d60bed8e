"""Which scratch a kernel really needs in memory.

What is stored and then loaded in one straight line of code, at known places, the compiler passes on in registers, and
the buffer costs nothing (31 of 1021 measured kernels: accumulators of a reduction that takes one step, temporaries of
`run_scoped`, scratch that nothing reads). An accumulator that carries a value from one grid step to the next stays.
"""

from __future__ import annotations

import math

from jax_vmem_guard.kernel_body import Op, Value
from jax_vmem_guard.mosaic import Ref, ref_of_text

_VIEWS = ("tpu.memref_slice", "tpu.memref_squeeze", "tpu.memref_reshape", "tpu.memref_bitcast", "memref.cast",
          "tpu.reinterpret_cast", "tpu.erase_memref_layout")
_LOADS = ("vector.load", "tpu.vector_load", "memref.load")
_STORES = ("tpu.vector_store", "vector.store", "memref.store")


def forwarded(ops: tuple[Op, ...], buffers: dict[int, tuple[int, ...]]) -> frozenset[int]:
    """The buffers the compiler can keep in registers.

    Args:
      ops: the folded body (`kernel_fold.fold`).
      buffers: `id` of a scratch argument's value -> its shape. Allocations in the body are found by themselves and come
        back by the `id` of their value.

    Returns:
      ids of the values of those that need no memory.
    """
    uses = _Uses(buffers)
    uses.scan(ops, straight=True)
    return frozenset(b for b in uses.shapes if b not in uses.needed)


class _Uses:
    """What has been seen of each buffer on the way through the code."""

    def __init__(self, buffers: dict[int, tuple[int, ...]]) -> None:
        self.shapes = dict(buffers)
        self.base = {b: b for b in buffers}  # a value that is a buffer, or a view of one -> the buffer
        self.written: set[int] = set()
        self.needed: set[int] = set()

    def scan(self, ops: tuple[Op, ...], straight: bool) -> None:
        for op in ops:
            if op.name == "memref.alloca":
                self._found(op.results[0])
            if op.name in _VIEWS and op.operands and id(op.operands[0]) in self.base:
                self.base[id(op.results[0])] = self.base[id(op.operands[0])]
            else:
                for value in op.operands:
                    if id(value) in self.base:
                        self._use(op, self.base[id(value)], straight)
            for block in op.blocks:
                self.scan(block, straight=False)

    def _found(self, value: Value) -> None:
        self.shapes[id(value)] = ref_of_text(value.dtype).shape
        self.base[id(value)] = id(value)

    def _use(self, op: Op, buffer: int, straight: bool) -> None:
        static = all(v.constant is not None for v in op.operands if v.dtype == "index")
        if not straight or not static:
            self.needed.add(buffer)
        elif op.name in _STORES:
            stored = next((v.shape for v in op.operands if v.shape is not None), ())
            if math.prod(stored) >= math.prod(self.shapes[buffer]):
                self.written.add(buffer)
        elif op.name in _LOADS:
            if buffer not in self.written:
                self.needed.add(buffer)
        elif op.name != "memref.alloca":
            self.needed.add(buffer)  # a DMA, or something else that wants an address


def alloca_chains(ops: tuple[Op, ...], without: frozenset[int]) -> tuple[tuple[Ref, ...], ...]:
    """Allocations that live at the same time, as in `MosaicKernel.alloca_chains`, those in `without` left out.

    Args:
      ops: the body as it was read, before folding takes its scopes away.
      without: ids of the values of allocations that need no memory.
    """
    return tuple(_chains(ops, (), without))


def _chains(ops: tuple[Op, ...], outer: tuple[Ref, ...], without: frozenset[int]) -> list[tuple[Ref, ...]]:
    own = [ref_of_text(op.results[0].dtype) for op in ops
           if op.name == "memref.alloca" and id(op.results[0]) not in without]
    here = outer + tuple(own)
    inner = [chain for op in ops for block in op.blocks for chain in _chains(block, here, without)]
    return inner if inner else [here] if own else []
