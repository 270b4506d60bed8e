"""Words for people: what a diagnosis means and what to do about it.

The text stands in the notes of the compiler's exceptions and in what `jax-vmem-guard explain` prints. It repeats none
of the compiler's own phrases, so that a log with both is still read right.
"""

from __future__ import annotations

import re

from jax_vmem_guard.breakdown import Allocation
from jax_vmem_guard.chips import CHIPS, Chip, KiB, MiB
from jax_vmem_guard.diagnosis import Diagnosis, find_in_log
from jax_vmem_guard.ways_out import ways_out

__all__ = ["candidates", "explain", "explain_log", "find_in_log"]

_WINDOW = re.compile(r"operator (?:input|output) (\d+)\. The window shape is (\S+), while the full shape is (\S+?)\. ")
_BUFFERS = re.compile(r"This allocation (?:has (\d+) buffering levels|is single buffered)")
_MOST_ROWS = 8


def explain(diagnosis: Diagnosis, chip: Chip | None = None) -> str:
    """What failed, why, where the bytes go, and what to do, least change first.

    Args:
      diagnosis: what the compiler said.
      chip: the chip the program was compiled for; where None, it is inferred from the numbers if they tell.
    """
    chips = (chip,) if chip else candidates(diagnosis)
    parts = [f"{_who(diagnosis)} {_what(diagnosis)}", *_background(diagnosis, chips)]
    if diagnosis.breakdown:
        parts += ["Where the bytes go:", *_rows(diagnosis.breakdown)]
    parts.append("What to do, least change first:")
    for number, way in enumerate(ways_out(diagnosis, chips), start=1):
        parts += [f"  {number}. {line}" if first else f"     {line}" for first, line in _lines(way)]
    return "\n".join(parts)


def explain_log(text: str) -> tuple[str, int]:
    """Text for the terminal about every distinct VMEM failure in a log, and the exit code: 0 found, 1 none found."""
    found = find_in_log(text)
    if not found:
        return _nothing_found(text), 1
    explained = [explain(diagnosis) for diagnosis in found]
    if len(found) > 1:
        explained = [f"Failure {n} of {len(found)}\n{words}" for n, words in enumerate(explained, start=1)]
    by_itself = "" if all(d.is_kernel is False or d.form == "pinned" for d in found) else (
        "\n\njax_vmem_guard can try this by itself, with the source as it is: JAX_VMEM_GUARD=fix in the environment, or"
        "\n`jax-vmem-guard run script.py`.")
    return "\n\n".join(explained) + by_itself, 0


def candidates(diagnosis: Diagnosis) -> tuple[Chip, ...]:
    """The chips whose compiler could have said this, by the limit or the capacity in the message."""
    if diagnosis.capacity_bytes is not None:
        # The form for one allocation states the nominal memory, the table form what is usable of it.
        return tuple(c for c in CHIPS if 0 <= diagnosis.capacity_bytes - c.capacity_bytes <= 64 * KiB
                     and not (diagnosis.form == "capacity" and diagnosis.capacity_bytes != c.capacity_bytes))
    limit = diagnosis.limit_bytes
    if limit is None:
        return CHIPS
    # Chips that have no more than their default limit never speak of a limit, only of the capacity.
    able = [c for c in CHIPS if c.capacity_bytes > c.default_limit_bytes and c.capacity_bytes >= limit]
    by_default = [c for c in able if c.default_limit_bytes == limit]
    return tuple(by_default or able)


def size(bytes_: int) -> str:
    """"48.00 MiB", or "64.0 KiB" below one MiB."""
    return f"{bytes_ / MiB:.2f} MiB" if bytes_ >= MiB else f"{bytes_ / KiB:.1f} KiB"


def _who(d: Diagnosis) -> str:
    if d.form == "pinned":
        pinned = ", ".join(f"`{b}`" for b in d.pinned_buffers)
        return f"Memory coloring (pinning to VMEM): {pinned or 'a pinned buffer'}"
    name = f" `{d.instruction}`" if d.instruction else ""
    who = {True: f"Kernel{name}", False: f"XLA's own instruction{name} (no kernel)",
           None: f"Instruction{name}" if name else "An instruction the text does not name"}[d.is_kernel]
    where = [part for part in (d.op_name, d.source and f"at {d.source}") if part]
    return f"{who} ({', '.join(where)})" if where else who


def _what(d: Diagnosis) -> str:
    need = size(d.size_bytes) if d.size_bytes is not None else "more than there is"
    if d.form == "pinned":
        return f"{f'({need}) ' if d.size_bytes is not None else ''}finds no place in VMEM."
    if d.form == "allocation":
        has = f", but the chip has {size(d.capacity_bytes)}" if d.capacity_bytes is not None else ""
        return f"makes one allocation of {need} of VMEM{has}."
    if d.form == "capacity":
        has = f"the chip has {size(d.capacity_bytes)}" if d.capacity_bytes is not None else "the chip has less"
        return f"needs {need} of scoped VMEM; {has}."
    at_least = f"at least {need}" if d.size_bytes is not None else need
    limit = f"; the limit is {size(d.limit_bytes)}" if d.limit_bytes is not None else ""
    over = f" ({size(d.size_bytes - d.limit_bytes)} over)" if d.size_bytes and d.limit_bytes else ""
    return f"needs {at_least} of scoped VMEM{limit}{over}."


def _background(d: Diagnosis, chips: tuple[Chip, ...]) -> list[str]:
    """What the numbers mean: whose limit it is, what the hardware has, that the need is a lower bound."""
    said = []
    if d.form == "limit":
        said.append(f"{_whose_limit(d, chips)} {_hardware(chips)}")
        if d.size_bytes is not None:
            said.append(f"{size(d.size_bytes)} is a lower bound: the compiler adds up scratch, then windows, then register "
                        "spill slots, and stops at the first sum above the limit.")
            if chips and d.size_bytes > max(c.capacity_bytes for c in chips):
                said.append(f"That is more than {_names(chips)} can give: no limit is enough.")
    elif d.form in ("capacity", "allocation") and len(chips) > 0:
        said.append(f"That is the hardware of {_names(chips)}; no limit or flag gives more.")
    return said


def _whose_limit(d: Diagnosis, chips: tuple[Chip, ...]) -> str:
    defaults = sorted({c.default_limit_bytes for c in chips})
    if d.limit_bytes is None:
        return "A kernel has a default limit of " + " or ".join(size(b) for b in defaults) + "."
    if all(d.limit_bytes == b for b in defaults):
        return f"The default limit of {_names(chips)} is {size(d.limit_bytes)}."
    default = " or ".join(size(b) for b in defaults)
    setter = ("the flag `xla_tpu_scoped_vmem_limit_kib`" if d.is_kernel is False else
              "the kernel's `vmem_limit_bytes` or the flag `xla_tpu_scoped_vmem_limit_kib`")
    return f"That limit was set by {setter}; the default is {default}."


def _hardware(chips: tuple[Chip, ...]) -> str:
    capacities = {c.capacity_bytes for c in chips}
    if len(capacities) == 1 and len(chips) == 1:
        return f"It is not the hardware: the chip has {size(chips[0].capacity_bytes)}."
    return "It is not the hardware: " + ", ".join(f"{c.name} has {size(c.capacity_bytes)}" for c in chips) + "."


def _names(chips: tuple[Chip, ...]) -> str:
    names = [c.name for c in chips]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _rows(breakdown: tuple[Allocation, ...]) -> list[str]:
    rows = [f"  {size(row.size_bytes):>11}  {_row(row)}" for row in breakdown[:_MOST_ROWS]]
    rest = breakdown[_MOST_ROWS:]
    if rest:
        rows.append(f"  {size(sum(r.size_bytes for r in rest)):>11}  {len(rest)} more")
    return rows


def _row(row: Allocation) -> str:
    window, buffers = _WINDOW.search(row.tag), _BUFFERS.search(row.tag)
    if window:
        levels = f", {buffers[1]} buffers" if buffers and buffers[1] else ", single buffered" if buffers else ""
        return f"{row.kind} {window[1]}: block {window[2]} of {window[3]}{levels}"
    if row.kind == "spill slots":
        return "register spill slots: values that the kernel's body keeps alive beyond the registers"
    if row.kind == "pinned":
        return f"`{row.instruction}`, pinned"
    return row.kind if row.kind != "other" else f"{row.tag or 'window or scratch, the compiler does not say which'}"


def _lines(way: str) -> list[tuple[bool, str]]:
    return [(number == 0, line) for number, line in enumerate(way.split("\n"))]


def _nothing_found(text: str) -> str:
    other = next((name for name, marks in {
        "HBM": ("memory space hbm", "E1000", "CompileTimeHbmOom"),
        "SMEM": ("memory space smem", "space=smem"),
        "the SparseCore's memory": ("tile_spmem", "memory space spmem", "CompileTimeSparseCoreAllocationFailure"),
    }.items() if any(mark in text for mark in marks)), None)
    if other:
        return f"No VMEM failure found: this text is about {other}, another memory, where VMEM limits do not help."
    return ("No VMEM failure found. Give the whole error message: it has `E1001`, `memory space vmem`, `space=vmem` or "
            "`colored in the alternate memory` in it.")
