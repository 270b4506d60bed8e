"""A `Report` as rows, for its page and for notebooks."""

from __future__ import annotations

import os
from html import escape
from typing import Any

from jax_vmem_guard.rows import FAILS, FITS, UNKNOWN, Item, Row

BUFFERS = ("window", "scratch", "alloca")
"""Kinds of items in a footprint that are buffers of the kernel's own; the others are estimates of what is added."""

FRAME_PIXELS_PER_ROW, FRAME_PIXELS = 130, 320


def rows_of(report: Any) -> tuple[Row, ...]:
    """One row per kernel of a `Report`."""
    return tuple(_row(kernel, report) for kernel in report.kernels)


def to_html(report: Any, *, title: str = "Scoped VMEM") -> str:
    """A `Report` as one self-contained page."""
    from jax_vmem_guard.html import page

    instructions = [(row.name, row.used_bytes, row.limit_bytes) for row in report.instructions]
    return page(rows_of(report), title=f"{title} on {report.chip}", instructions=instructions)


def notebook_html(text: str, rows: int) -> str:
    """A page for a notebook's output cell: in a frame of its own, so that its style stays inside."""
    height = min(900, FRAME_PIXELS + FRAME_PIXELS_PER_ROW * rows)
    return (f'<iframe srcdoc="{escape(text)}" sandbox="allow-scripts" title="Scoped VMEM" '
            f'style="width: 100%; height: {height}px; border: 0"></iframe>')


def _row(kernel: Any, report: Any) -> Row:
    verdict = {True: FITS, False: FAILS, None: UNKNOWN}[kernel.fits]
    used = kernel.used_bytes
    scratch, body = kernel.scratch_bytes, kernel.alloca_bytes
    need = used if used is not None else kernel.expected_bytes
    # Where XLA places operands in VMEM itself, their windows cost nothing: what is used is less than the parts.
    windows = min(kernel.window_bytes, max(0, need - scratch - body))
    words = {True: None, False: "needs more than its limit for certain",
             None: "may or may not fit: compile it, or see what `check` says"}[kernel.fits]
    return Row(
        program=kernel.instruction or "", kernel=kernel.name, source=from_here(kernel.called_from or kernel.source),
        topology=report.chip, chip=kernel.chip, verdict=verdict, need_bytes=need, measured=used is not None,
        limit_bytes=kernel.limit_bytes, capacity_bytes=kernel.capacity_bytes, windows_bytes=windows,
        scratch_bytes=min(scratch, need), body_bytes=min(body, need),
        spills_bytes=max(0, need - windows - scratch - body), reason="; ".join(filter(None, (words, *kernel.unknown))),
        edit=None if kernel.fits else "\n".join(kernel.advice) or None,
        items=tuple(item_of(item) for item in (*kernel.windows, *kernel.scratch, *kernel.allocas)))


def from_here(source: str | None) -> str | None:
    """A source line as seen from the working directory, where it is inside of it."""
    return None if source is None else source.removeprefix(os.path.join(os.getcwd(), ""))


def item_of(item: Any) -> Item:
    """One buffer of a footprint in words."""
    padded = tuple(item.padded_shape)
    remark = f"pads to {list(padded)}" if padded[-len(item.shape):] != tuple(item.shape) else ""
    words = {"window": item.role, "scratch": "scratch", "alloca": "allocation"}.get(item.kind, item.kind)
    return Item(what=f"{words} {item.position}", shape=str(list(item.shape)), dtype=item.dtype, buffers=item.buffers,
                bytes=item.bytes, remark=remark)
