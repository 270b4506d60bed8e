"""A report as text: tables by rich where it is installed, else plain columns."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_vmem_guard.chips import MiB

if TYPE_CHECKING:
    from jax_vmem_guard.report import KernelReport, Report


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, a header, rows of text; columns named in `numbers` are set right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str]
    notes: tuple[str, ...] = ()


def mib(size: int | None) -> str:
    """Bytes as MiB with two digits, four where two would hide them; "-" where unknown."""
    if size is None:
        return "-"
    return f"{size / MiB:.4f}" if 0 < abs(size) < MiB // 16 else f"{size / MiB:.2f}"


def kernel_table(report: Report) -> Table:
    """One line a kernel; its windows with padding, and what would shrink it, as notes."""
    compiled = any(kernel.used_bytes is not None for kernel in report.kernels)
    header = ("kernel", "windows", "scratch", "body", "spills", "used" if compiled else "expected", "at most", "limit",
              "headroom", "capacity", "fits")
    rows = tuple(
        (kernel.name, mib(kernel.window_bytes), mib(kernel.scratch_bytes), mib(kernel.alloca_bytes),
         mib(kernel.spill_bytes), mib(kernel.need_bytes), mib(kernel.at_most_bytes),
         mib(kernel.limit_bytes) + ("" if kernel.own_limit else " (default)"), mib(kernel.headroom_bytes),
         mib(kernel.capacity_bytes), {True: "yes", False: "no", None: "not sure"}[kernel.fits])
        for kernel in report.kernels)
    notes = tuple(note for kernel in report.kernels for note in _notes(kernel))
    return Table(title=f"TPU kernels on {report.chip}, scoped VMEM in MiB", header=header, rows=rows,
                 numbers=frozenset(header[1:-1]), notes=notes)


def instruction_table(report: Report) -> Table:
    """Every instruction of a compiled program that uses scoped VMEM."""
    header = ("instruction", "opcode", "kernel", "used", "limit", "headroom")
    rows = tuple(
        (i.name, i.opcode, "yes" if i.is_kernel else "", mib(i.used_bytes), mib(i.limit_bytes), mib(i.headroom_bytes))
        for i in sorted(report.instructions, key=lambda i: -i.used_bytes))
    return Table(title="HLO instructions with scoped VMEM, in MiB", header=header, rows=rows,
                 numbers=frozenset(header[3:]))


def _notes(kernel: KernelReport) -> list[str]:
    notes = [f"{kernel.name}{f' at {kernel.source}' if kernel.source else ''}"]
    for item in kernel.windows + kernel.scratch + kernel.allocas:
        what = f"{item.role} {item.position}" if item.kind == "window" else f"{item.kind} {item.position}"
        line = f"  {what}: {item.dtype}[{', '.join(map(str, item.shape))}]"
        if item.padded_shape != item.shape:
            line += f" padded to [{', '.join(map(str, item.padded_shape))}]"
        if not item.buffers:
            notes.append(f"{line} stays in registers")
            continue
        notes.append(f"{line} x {item.buffers} = {mib(item.bytes)} MiB")
    notes += [f"  {reason}" for reason in kernel.unknown]
    notes += [f"  to shrink it: {advice}" for advice in kernel.advice]
    return notes


def render(tables: Sequence[Table]) -> str:
    """The tables under each other, as text without colours."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        return "\n\n".join(map(_plain, tables))
    out = io.StringIO()
    width = max(120, int(os.environ.get("COLUMNS", "0") or 0))
    console = Console(file=out, width=width, no_color=True, highlight=False, markup=False)
    for table in tables:
        rich = RichTable(title=table.title)
        for name in table.header:
            rich.add_column(name, justify="right" if name in table.numbers else "left", overflow="fold")
        for row in table.rows:
            rich.add_row(*row)
        console.print(rich)
        for note in table.notes:
            console.print(note, soft_wrap=True)
    return out.getvalue().rstrip("\n")


def _plain(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    text = [table.title]
    for line in lines:
        cells = [cell.rjust(w) if name in table.numbers else cell.ljust(w)
                 for cell, w, name in zip(line, widths, table.header, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join([*text, *table.notes])
