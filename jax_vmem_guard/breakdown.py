"""Reads the itemised allocations in the compiler's "Used X of Y vmem" and "would exceed memory" messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.hlo_text import SIZE, Instruction, read_attributes, read_instruction, size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One row of the compiler's itemised table.

    Attributes:
      size_bytes: all buffers of the row together, as printed (rounded to 0.01 MiB).
      tag: the compiler's words: "input window allocation for operator input 0. ...", "scratch operand".
      instruction: the HLO instruction that owns it, without `%`; None where the row does not say.
      kind: "input window", "output window", "scratch", "spill slots", "internal", "in-body" (allocated in the
        kernel's body, `pl.run_scoped`), "pinned" (a buffer colored into VMEM) or "other".
    """

    size_bytes: int
    tag: str
    instruction: str | None
    kind: str


_KINDS = (  # first match wins
    ("input window", "input window"),
    ("operand span", "input window"),
    ("output window", "output window"),
    ("spill slots", "spill slots"),
    ("spilled", "spill slots"),
    ("internal scratch", "internal"),
    ("scratch", "scratch"),
    ("scoped memory", "in-body"),
)

_ROW = re.compile(rf"\b\d+\. Size: ({SIZE})(?=\s)")
_OPERATOR = re.compile(r"\bOperator: ([^\n]*)")
_TAG = re.compile(r"\bTag: ([^\n]*)")
_LABEL = re.compile(r"\bXLA label: (.*?)(?=\s*\n[^\n]*(?:Allocation type:|={10})|\Z)", re.DOTALL)
_SPILLED_IN = re.compile(r"in HLO :: ([\w.\-]+)")


def kind_of(tag: str) -> str:
    """The kind of allocation that the compiler's tag tells of."""
    return next((kind for words, kind in _KINDS if words in tag), "other")


def read_table(text: str) -> tuple[tuple[Allocation, ...], Instruction]:
    """The rows of the table in `text`, and the instruction that owns most of their bytes."""
    starts = list(_ROW.finditer(text))
    rows: list[Allocation] = []
    owners: list[Instruction] = []
    for position, start in enumerate(starts):
        end = starts[position + 1].start() if position + 1 < len(starts) else len(text)
        row, owner = _read_row(size_in_bytes(start[1]), text[start.end():end])
        rows.append(row)
        owners.append(owner)
    return tuple(rows), _main_owner(rows, owners)


def _read_row(size_bytes: int, text: str) -> tuple[Allocation, Instruction]:
    label = _LABEL.search(text)
    said = label[1].strip() if label else ""
    tag = _TAG.search(text)
    spilled = _SPILLED_IN.search(said)
    if spilled:
        owner = Instruction(name=spilled[1])
    elif " = " in said:
        owner = _with_operator(read_instruction(_as_instruction(said)), text)
    else:
        owner = Instruction()
    words = tag[1].strip() if tag else ("" if owner.opcode else said)
    return Allocation(size_bytes=size_bytes, tag=words, instruction=owner.name, kind=kind_of(words)), owner


def _as_instruction(label: str) -> str:
    """The table leaves the result's shape out ("k.1 = custom-call(...)"): put a blank one in, if so."""
    name, rest = label.split(" = ", 1)
    return f"{name} = ? {rest}" if re.match(r"[a-z][a-z0-9\-]*\(", rest) else label


def _with_operator(owner: Instruction, text: str) -> Instruction:
    """`owner` with op_name and source from the row's "Operator:" line, where the table keeps them."""
    line = _OPERATOR.search(text)
    if not line:
        return owner
    said = read_attributes(line[1] + "\n", name=None, opcode=None)
    return Instruction(name=owner.name, opcode=owner.opcode, is_kernel=owner.is_kernel, label=owner.label,
                       op_name=owner.op_name or said.op_name, source=owner.source or said.source)


def _main_owner(rows: list[Allocation], owners: list[Instruction]) -> Instruction:
    """The instruction with most bytes, told by those of its rows that say most about it."""
    totals: dict[str, int] = {}
    for row in rows:
        if row.instruction is not None:
            totals[row.instruction] = totals.get(row.instruction, 0) + row.size_bytes
    if not totals:
        return Instruction()
    main = max(totals, key=lambda name: totals[name])
    told = [owner for owner in owners if owner.name == main]

    def first(field: str) -> Any:  # the first row that knows it
        return next((value for owner in told if (value := getattr(owner, field)) is not None), None)

    return Instruction(name=main, opcode=first("opcode"), is_kernel=first("is_kernel"), op_name=first("op_name"),
                       source=first("source"), label=first("label"))
