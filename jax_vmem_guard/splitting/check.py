"""Checks a rebuilt kernel against the original, without trusting the proof or the way it was rebuilt.

Both kernels are read forwards and numbered (`numbering`). In the end every buffer must hold the same number in both:
the same stores of the same values to the same places in the same order, under the same conditions and loops. Declared
effects must name every buffer that is written, or JAX may delete the stores later.

What this cannot see: sizes. They are the proof's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.numbering import Numbering
from jax_vmem_guard.splitting.terms import Table
from jax_vmem_guard.splitting.ways import Label


def same_kernel(original: Any, rebuilt: Any, *, axis: int, parts: int, steps: int, labels: Sequence[Label]) -> None:
    """Raises `Refused` unless the rebuilt kernel jaxpr does what the original does.

    Args:
      axis: the split axis, as `program_id` numbers it.
      parts: k.
      steps: programs along the axis in the original.
      labels: of the kernel's references, to say which buffer differs.
    """
    table = Table()
    before = Numbering(table=table, steps={axis: steps})
    after = Numbering(table=table, split_axis=axis, parts=parts,
                      cut={("operand", i): label for i, label in enumerate(labels) if label is not None})
    try:
        held_before, held_after = before.kernel(original), after.kernel(rebuilt)
    except Refused as error:
        raise Refused(f"the rebuilt kernel could not be checked: {error.reason}") from None
    for position in range(len(labels)):
        ref = ("operand", position)
        if held_before.get(ref) != held_after.get(ref):
            raise Refused(f"the rebuilt kernel does not leave the same value in reference {position} "
                          "as the original (rebuild check)")
    written_before, written_after = jp.declared_writes(original), jp.declared_writes(rebuilt)
    if written_before != written_after:
        raise Refused(f"the rebuilt kernel declares other writes than the original: {sorted(written_after)} "
                      f"for {sorted(written_before)} (rebuild check)")


def same_windows(original: Any, rebuilt: Any, *, axes: int, axis: int, parts: int, follows: int | None) -> None:
    """Raises `Refused` unless the rebuilt index map gives the original's blocks.

    Args:
      original, rebuilt: index map jaxprs, closed.
      axes: how many of their inputs are grid indices.
      axis: the split grid axis.
      parts: k.
      follows: the dimension that is cut and moves with the finer steps: block e becomes e*k + (grid index % k) there.
        None where the block stays the original's.
    """
    table = Table()
    before = Numbering(table=table).index_map(original, axes)
    split = Numbering(table=table, split_axis=axis, parts=parts)
    after = split.index_map(rebuilt, axes)
    for dim, (was, now) in enumerate(zip(before, after, strict=True)):
        wanted = [was]
        if dim == follows:
            wanted = [split.finer_block(was)]
            if was in (table.number(("program_id", axis)), split.literal(0, np.int32)):
                wanted.append(table.number(("fine", axis)))
        if now not in wanted:
            raise Refused(f"the rebuilt index map does not follow the original in dimension {dim} (rebuild check)")
