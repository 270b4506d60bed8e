"""Moves whole operands and results of a kernel into VMEM placed by XLA, out of the kernel's scoped allocation.

A kernel that takes an operand in one window holds all of it in its scoped VMEM, or twice that where the window is
double buffered. Colored with VMEM's number, the operand is placed in VMEM by XLA, which copies it in before the kernel
runs and a result out after; the kernel's window then takes nothing. The values are the same.

Measured with libtpu 0.0.30 to 0.0.52 on v5e, v5p, v6e and tpu7x:

* What is colored and the kernel's scoped limit (not only its need) must fit the chip together, to the byte. So the
  change also holds the limit down to what the colored arrays leave.
* A colored result is copied out by an instruction that follows the default limit: beside that it must fit too.
* On v2, v3 and v4 the compiler refuses the color ("Invalid memory space: 1").
* Coloring an operand that the kernel writes its result over (`input_output_aliases`) can abort the compiler, and the
  process with it. Neither side of such a pair is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, MiB
from jax_vmem_guard.footprint import block_bytes
from jax_vmem_guard.kernels import VMEM_CONFIG, Kernel, Window
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import limit
from jax_vmem_guard.tiling import SUBLANES, padded_bytes

NAME = "coloring"

#: The first TPU generation whose compiler places colored buffers in VMEM.
FIRST_GENERATION = 5

_INPUTS = "input_memory_space_colors"
_OUTPUTS = "output_memory_space_colors"
#: Colors of results as jax 0.8 and 0.9 write them: one number for each result, -1 for none. libtpu 0.0.30 and 0.0.34
#: read both forms.
_OUTPUT_LIST = "output_memory_colors"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A whole operand or result that may move.

    Attributes:
      window: its window.
      number: its position among the custom call's operands, or among its results.
      saved_bytes: what its window takes of the scoped allocation.
      array_bytes: what the array takes of the chip once XLA places it.
    """

    window: Window
    number: int
    saved_bytes: int
    array_bytes: int


def propose(kernel: Kernel, *, need_bytes: int, target_bytes: int, chip: Chip, policy: Policy) -> tuple[Change, ...]:
    """Changes that bring the need down to the target, least first.

    The first places the fewest bytes in VMEM that should suffice, each later one more, the last all that fit. Only
    sets are proposed that fit the chip beside what the kernel then needs. Where none suffices, the one that saves most
    is proposed alone: another remedy may do the rest. `data["expected_bytes"]` holds the need each change should lead
    to.

    Args:
      kernel: the kernel as it is.
      need_bytes: scoped VMEM it needs.
      target_bytes: what the need must come down to.
      chip: the chip it is compiled for.
      policy: what the guard may do; nothing in it concerns this remedy.
    """
    del policy
    if need_bytes <= target_bytes:
        return ()
    room = chip.capacity_bytes - _colored_already(kernel, chip)
    fitting = [chosen for chosen in _choices(tuple(candidates(kernel, chip)), need_bytes - target_bytes)
               if need_bytes - _saved(chosen) <= room - _placed(chosen) and _can_leave(chosen, chip)]
    sufficient = [chosen for chosen in fitting if need_bytes - _saved(chosen) <= target_bytes]
    return tuple(_change(kernel, chosen, need_bytes, room - _placed(chosen), chip)
                 for chosen in sufficient or fitting[-1:])


def candidates(kernel: Kernel, chip: Chip) -> Iterator[Candidate]:
    """The operands and results that the kernel takes whole and that XLA may place in VMEM."""
    if not kernel.readable or kernel.core != "tc" or kernel.communicates or chip.generation < FIRST_GENERATION:
        return
    outputs = [w.operand for w in kernel.windows if w.role == "output"]
    shared_results = {result for result, _ in kernel.aliases}
    shared_operands = {operand for _, operand in kernel.aliases}
    fusible = {i for i, allowed in enumerate(kernel.allow_input_fusion) if allowed}
    for window in kernel.windows:
        if window.role == "prefetch" or window.memory_space != "vmem" or not window.buffers or not _whole(window):
            continue
        is_output = window.role == "output"
        number = outputs.index(window.operand) if is_output else window.operand
        if is_output and (number in shared_results or number in kernel.output_colors):
            continue
        if not is_output and (number in shared_operands | fusible or number in kernel.input_colors):
            continue
        yield Candidate(window=window, number=number, saved_bytes=block_bytes(window, chip) * window.buffers,
                        array_bytes=_array_bytes(window, chip))


def _choices(found: tuple[Candidate, ...], excess: int) -> list[tuple[Candidate, ...]]:
    """Sets of arrays, those that save at least `excess` with the fewest bytes first, then growing ones."""
    # What is double buffered frees more than it takes: it goes first, small before large.
    small_first = sorted(found, key=lambda c: (c.array_bytes / c.saved_bytes, c.saved_bytes))
    large_first = sorted(found, key=lambda c: (c.array_bytes / c.saved_bytes, -c.saved_bytes))
    enough = next((chosen for chosen in _growing(small_first) if _saved(chosen) >= excess), None)
    least = [_without_needless(enough, excess)] if enough else []
    least += [(c,) for c in small_first if c.saved_bytes >= excess][:1]
    ordered = sorted(least, key=lambda chosen: (_placed(chosen), len(chosen))) + list(_growing(large_first))
    sets = [frozenset(c.window.operand for c in chosen) for chosen in ordered]
    return [chosen for position, chosen in enumerate(ordered) if sets[position] not in sets[:position]]


def _growing(ranked: Sequence[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    for count in range(1, len(ranked) + 1):
        yield tuple(ranked[:count])


def _without_needless(chosen: tuple[Candidate, ...], excess: int) -> tuple[Candidate, ...]:
    for candidate in chosen:
        fewer = tuple(c for c in chosen if c is not candidate)
        if fewer and _saved(fewer) >= excess:
            chosen = fewer
    return chosen


def _saved(chosen: Sequence[Candidate]) -> int:
    return sum(c.saved_bytes for c in chosen)


def _placed(chosen: Sequence[Candidate]) -> int:
    return sum(c.array_bytes for c in chosen)


def _can_leave(chosen: Sequence[Candidate], chip: Chip) -> bool:
    """Whether the results fit beside the instruction that copies them out."""
    results = _placed([c for c in chosen if c.window.role == "output"])
    return results == 0 or results + chip.default_limit_bytes <= chip.capacity_bytes


def _whole(window: Window) -> bool:
    """Whether one block of the window is the whole array."""
    static = all(d > 0 for d in (*window.block_shape, *window.array_shape))
    return static and math.prod(window.block_shape) == math.prod(window.array_shape)


def _array_bytes(window: Window, chip: Chip) -> int:
    """Bytes of the whole array where XLA places it, counted in full tiles of 8 rows."""
    *leading, rows, columns = (1, 1, *window.array_shape)
    shape = (*leading, -(-rows // SUBLANES) * SUBLANES, columns)
    return padded_bytes(shape, window.dtype, chip.generation)


def _colored_already(kernel: Kernel, chip: Chip) -> int:
    """Bytes that the kernel's author has placed in VMEM."""
    outputs = [w for w in kernel.windows if w.role == "output"]
    inputs = {w.operand: w for w in kernel.windows if w.role == "input"}
    pinned = [outputs[i] for i, color in kernel.output_colors.items() if color == VMEM_CONFIG and i < len(outputs)]
    pinned += [inputs[i] for i, color in kernel.input_colors.items() if color == VMEM_CONFIG and i in inputs]
    return sum(_array_bytes(window, chip) for window in pinned)


def _change(kernel: Kernel, chosen: Sequence[Candidate], need_bytes: int, room: int, chip: Chip) -> Change:
    names = ", ".join(f"{c.window.role} {_index(kernel, c.window)} "
                      f"({c.window.dtype}[{'x'.join(map(str, c.window.array_shape))}])" for c in chosen)
    expected = need_bytes - _saved(chosen)
    default = kernel.limit_bytes if kernel.limit_bytes is not None else chip.default_limit_bytes
    return Change(
        kernel=kernel.name, fingerprint=kernel.fingerprint, source=kernel.source, remedy=NAME,
        before=f"{names} in the kernel's scoped VMEM",
        after=f"{names} in VMEM placed by XLA, {_saved(chosen) / MiB:.2f} MiB less scoped",
        need_bytes=None,
        edit=f"{kernel.source or 'its pallas_call'}: {_edit(kernel, chosen)}",
        data={"inputs": sorted(c.number for c in chosen if c.window.role == "input"),
              "outputs": sorted(c.number for c in chosen if c.window.role == "output"),
              "results": sum(w.role == "output" for w in kernel.windows),
              "expected_bytes": expected,
              "room_bytes": room,
              "limit_bytes": min(max(default, limit.with_margin(expected, chip)), room)})


def _edit(kernel: Kernel, chosen: Sequence[Candidate]) -> str:
    """What the author would write: a constraint around an operand, a memory space on a result."""
    inputs = [str(_index(kernel, c.window)) for c in chosen if c.window.role == "input"]
    outputs = [str(_index(kernel, c.window)) for c in chosen if c.window.role == "output"]
    steps = []
    if inputs:
        steps.append(f"pltpu.with_memory_space_constraint(x, pltpu.VMEM) around input {', '.join(inputs)}")
    if outputs:
        steps.append(f"out_shape=pltpu.VMEM(shape, dtype) for output {', '.join(outputs)}")
    return " and ".join(steps)


def _index(kernel: Kernel, window: Window) -> int:
    """Position among the kernel's inputs or outputs, as `in_specs` and `out_specs` count them."""
    return [w.operand for w in kernel.windows if w.role == window.role].index(window.operand)


def apply(config: dict[str, Any], change: Change) -> None:
    """Write the colors of `change` into a custom call's backend config, beside those that are there.

    The limit is lowered to what the colored arrays leave of the chip; a lower one stays.
    """
    call = config["custom_call_config"]
    inputs = {int(entry.get("operand_index", 0)): entry for entry in call.get(_INPUTS, ())}
    inputs |= {number: {"operand_index": number, "color": VMEM_CONFIG} for number in change.data["inputs"]}
    if inputs:
        call[_INPUTS] = [inputs[number] for number in sorted(inputs)]
    _color_outputs(call, change.data["outputs"], change.data["results"])
    room = change.data["room_bytes"]
    own = [entry for entry in config.get("scoped_memory_configs", ()) if int(entry["memory_space"]) == VMEM_CONFIG]
    size = min(int(own[0]["size"]), room) if own else change.data["limit_bytes"]
    config["scoped_memory_configs"] = [{"memory_space": VMEM_CONFIG, "offset": 0, "size": size}]


def _color_outputs(call: dict[str, Any], numbers: Sequence[int], results: int) -> None:
    if not numbers:
        return
    if _OUTPUT_LIST in call:
        colors = list(call[_OUTPUT_LIST]) + [-1] * (results - len(call[_OUTPUT_LIST]))
        call[_OUTPUT_LIST] = [VMEM_CONFIG if i in numbers else color for i, color in enumerate(colors)]
        return
    entries = {int((entry.get("shape_index") or [0])[0]): entry for entry in call.get(_OUTPUTS, ())}
    for number in numbers:
        # The color of an only result has no index: it is no tuple.
        entries[number] = {"color": VMEM_CONFIG, **({"shape_index": [number]} if results > 1 else {})}
    call[_OUTPUTS] = [entries[number] for number in sorted(entries)]
