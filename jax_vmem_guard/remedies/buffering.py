"""Keeps one block of a window in VMEM instead of two: `pl.Buffered(1)`, written into the kernel's own code.

A double-buffered window loads its next block while the kernel works on this one. With one buffer the kernel waits for
the load, and the window takes half the VMEM. What the kernel computes stays the same: only when a block is copied
changes, never which. Only windows that the compiler pipelines are touched; buffers a kernel fills by its own DMA, and
those of `emit_pipeline` in its body, are its own business.

The change is an attribute of the window in the kernel's stable Mosaic code. Measured on jax 0.8.1 to 0.12.0 with v4,
v5e, v5p, v6e and tpu7x: the use falls by exactly one block for each window, give or take a few 4 KiB spill slots.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, MiB
from jax_vmem_guard.footprint import block_bytes
from jax_vmem_guard.kernels import Kernel, Window
from jax_vmem_guard.mosaic import index_map_code
from jax_vmem_guard.policy import Policy

NAME = "buffering"

_WINDOWS = "window_params"
_MODE = "pipeline_mode"
_ONE_BUFFER = "#tpu.pipeline_mode<synchronous>"

#: Steps assumed along a grid axis whose bound is known only at run time; only the order of windows depends on it.
_STEPS_OF_A_DYNAMIC_AXIS = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A double-buffered window that could do with one buffer.

    Attributes:
      position: among the windows of the kernel's code, which scalar prefetch operands are not part of.
      window: its record.
      saved_bytes: what one buffer less frees: one block, padding included.
      invariant: the block stays the same over the innermost grid steps, so most steps wait for nothing.
      transfers: how often another block is loaded or stored in a run over the whole grid.
    """

    position: int
    window: Window
    saved_bytes: int
    invariant: bool
    transfers: int

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sorts what loses least first: invariant windows, then by bytes saved for each transfer that is now awaited."""
        return (not self.invariant, -self.saved_bytes / self.transfers, self.position)


def propose(kernel: Kernel, *, need_bytes: int, target_bytes: int, chip: Chip, policy: Policy) -> tuple[Change, ...]:
    """Changes that bring the need down to the target, least first.

    The first is the smallest set of windows that should suffice, each later one has more windows, the last has all.
    Where all of them do not suffice, only the last is proposed: another remedy may do the rest. `data["expected_bytes"]`
    holds the need each change should lead to; `data["last_resort"]` marks those that make every grid step wait.

    Args:
      kernel: the kernel as it is.
      need_bytes: scoped VMEM it needs.
      target_bytes: what the need must come down to.
      chip: the chip it is compiled for; the padding of a block depends on it.
      policy: what the guard may do; nothing in it concerns this remedy.
    """
    del policy
    ranked = sorted(candidates(kernel, chip), key=lambda c: c.rank)
    if not ranked or need_bytes <= target_bytes:
        return ()
    return tuple(_change(kernel, chosen, need_bytes) for chosen in _choices(ranked, need_bytes - target_bytes))


def candidates(kernel: Kernel, chip: Chip) -> Iterator[Candidate]:
    """The windows that have two buffers and keep their meaning with one."""
    if not kernel.readable or kernel.core != "tc":
        return
    in_place = _overwritten_elsewhere(kernel)
    for position, window in enumerate(w for w in kernel.windows if w.role != "prefetch"):
        if window.memory_space != "vmem" or window.buffers < 2 or window.synchronous or window.operand in in_place:
            continue
        yield Candidate(position=position, window=window, saved_bytes=block_bytes(window, chip),
                        invariant=_invariant(kernel, window), transfers=_transfers(kernel, window))


def _choices(ranked: Sequence[Candidate], excess: int) -> Iterator[tuple[Candidate, ...]]:
    """Growing sets of windows that save at least `excess` bytes; the whole set where nothing smaller does."""
    first = True
    for count in range(1, len(ranked) + 1):
        chosen = tuple(ranked[:count])
        if _saved(chosen) < excess and count < len(ranked):
            continue
        if first and (fewer := _without_needless(chosen, excess)) != chosen:
            yield fewer
        yield chosen
        first = False


def _without_needless(chosen: tuple[Candidate, ...], excess: int) -> tuple[Candidate, ...]:
    """`chosen` less the windows whose saving is not needed, those that lose most left out first."""
    for candidate in reversed(chosen):
        fewer = tuple(c for c in chosen if c is not candidate)
        if fewer and _saved(fewer) >= excess:
            chosen = fewer
    return chosen


def _saved(chosen: Sequence[Candidate]) -> int:
    return sum(c.saved_bytes for c in chosen)


def _invariant(kernel: Kernel, window: Window) -> bool:
    """Whether the block index is the same over the innermost grid axis that has more than one step."""
    if _one_block(window):
        return True
    if window.varies_with is None:
        return False
    moving = [axis for axis, bound in enumerate(kernel.grid) if bound != 1]
    return not moving or moving[-1] not in window.varies_with


def _transfers(kernel: Kernel, window: Window) -> int:
    """How often the block changes in one run over the grid, the first block included."""
    if _one_block(window):
        return 1
    last = max(window.varies_with, default=-1) if window.varies_with is not None else len(kernel.grid) - 1
    return math.prod(_STEPS_OF_A_DYNAMIC_AXIS if bound is None else max(bound, 1) for bound in kernel.grid[:last + 1])


def _one_block(window: Window) -> bool:
    return math.prod(window.block_shape) >= math.prod(window.array_shape)


def _overwritten_elsewhere(kernel: Kernel) -> frozenset[int]:
    """Operands that share memory with a result whose blocks may lie elsewhere in the same grid step.

    With two buffers such a kernel may read a block before an earlier step has stored over it, with one buffer after:
    its author may have relied on the order, so both windows stay as they are. Where operand and result move in the
    same way, each block is read before it is stored, whatever the buffering.
    """
    outputs = [w.operand for w in kernel.windows if w.role == "output"]
    elsewhere: set[int] = set()
    for result, operand in kernel.aliases:
        target = outputs[result] if result < len(outputs) else None
        source_map, target_map = _index_map(kernel, operand), _index_map(kernel, target)
        if source_map is None or source_map != target_map:
            elsewhere |= {operand, target} if target is not None else {operand}
    return frozenset(elsewhere)


def _index_map(kernel: Kernel, operand: int | None) -> tuple[tuple[int, ...], str] | None:
    """The block shape of a window and the code of its index map; None where there is none to read."""
    windows = [w for w in kernel.windows if w.role != "prefetch"]
    position = next((i for i, w in enumerate(windows) if w.operand == operand), None)
    if position is None or kernel.code is None or windows[position].data_dependent:
        return None
    code = index_map_code(kernel.code, position)
    return None if code is None else (windows[position].block_shape, code)


def _change(kernel: Kernel, chosen: Sequence[Candidate], need_bytes: int) -> Change:
    ordered = sorted(chosen, key=lambda c: c.position)
    what = ", ".join(_describe(kernel, c.window) for c in ordered)
    specs = ", ".join(_spec(kernel, c.window) for c in ordered)
    return Change(
        kernel=kernel.name, fingerprint=kernel.fingerprint, source=kernel.source, remedy=NAME,
        before=f"2 buffers for {what}",
        after=f"1 buffer for {what}, {_saved(chosen) / MiB:.2f} MiB less",
        need_bytes=None,
        edit=f"{kernel.source or 'its pallas_call'}: pipeline_mode=pl.Buffered(1) in the BlockSpec of {specs}",
        data={"windows": [c.position for c in ordered],
              "expected_bytes": need_bytes - _saved(chosen),
              "last_resort": not all(c.invariant for c in chosen)})


def _describe(kernel: Kernel, window: Window) -> str:
    shape = "x".join(map(str, window.block_shape))
    return f"{window.role} {_index(kernel, window)} ({window.dtype}[{shape}])"


def _spec(kernel: Kernel, window: Window) -> str:
    return f"{'in' if window.role == 'input' else 'out'}_specs[{_index(kernel, window)}]"


def _index(kernel: Kernel, window: Window) -> int:
    """Position among the kernel's inputs or outputs, as `in_specs` and `out_specs` count them."""
    return [w.operand for w in kernel.windows if w.role == window.role].index(window.operand)


def apply(config: dict[str, Any], change: Change) -> None:
    """Write one buffer for the windows of `change` into the kernel's code, in a custom call's backend config.

    Everything else in the code stays as it was, IR version included.

    Raises:
      ValueError: the code has no such windows.
    """
    call = config["custom_call_config"]
    module = _jax.parse_shipped_mosaic(base64.b64decode(call["body"]))
    functions = [op for op in module.body.operations if _WINDOWS in op.attributes]
    if len(functions) != 1:
        raise ValueError(f"`{change.kernel}` has {len(functions)} functions with windows, buffering can change one")
    ir = _jax.ir()
    with module.context:
        windows = list(ir.ArrayAttr(functions[0].attributes[_WINDOWS]))
        for position in change.data["windows"]:
            if position >= len(windows):
                raise ValueError(f"`{change.kernel}` has {len(windows)} windows, there is no window {position}")
            entries = ir.DictAttr(windows[position])
            named = {entries[i].name: entries[i].attr for i in range(len(entries))}
            windows[position] = ir.DictAttr.get({**named, _MODE: ir.Attribute.parse(_ONE_BUFFER)})
        functions[0].attributes[_WINDOWS] = ir.ArrayAttr.get(windows)
    call["body"] = base64.b64encode(_jax.mosaic_bytecode(module)).decode("ascii")
