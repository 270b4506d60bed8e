"""Rows as a table for people: plain text, or a rich table with bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax_vmem_guard.chips import MiB
from jax_vmem_guard.rows import ERROR, FAILS, FITS, GOOD, REPAIRED, UNKNOWN, VERDICT_WORDS, Row, exceeds

HEADINGS = ("kernel", "chip", "need", "limit", "capacity", "headroom", "verdict")
_NUMBERS = range(2, 6)
_STYLES = {FITS: "green", REPAIRED: "yellow", FAILS: "bold red", ERROR: "red", UNKNOWN: "dim"}


def cells(row: Row, *, max_share: float | None = None) -> tuple[str, ...]:
    """One row in words, in the order of `HEADINGS`; sizes in MiB. `~` marks a need that nothing measured."""
    need = "-" if row.need_bytes is None else ("" if row.measured else "~") + mib(row.need_bytes)
    verdict = VERDICT_WORDS[row.verdict]
    if row.verdict in GOOD and exceeds(row, max_share):
        verdict = "too little left"
    return (row.kernel, row.topology, need, mib(row.limit_bytes), mib(row.capacity_bytes), mib(row.headroom_bytes),
            verdict)


def mib(size: int | None) -> str:
    """Bytes as MiB with two digits; "-" for what is unknown."""
    return "-" if size is None else f"{size / MiB:.2f}"


def grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows so that the chips of one kernel stand together, kernels in order of appearance."""
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.program, row.kernel, row.source), []).append(row)
    return [row for group in groups.values() for row in group]


def table(rows: Sequence[Row], *, max_share: float | None = None) -> list[tuple[str, Row | None]]:
    """The table as lines of text, each with its row; the first line is the headings, with None."""
    found = grouped(rows)
    lines = [HEADINGS, *(cells(row, max_share=max_share) for row in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    texts = ["  ".join(cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
                       for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
             for line in lines]
    return list(zip(texts, (None, *found), strict=True))


def plain_text(rows: Sequence[Row], *, max_share: float | None = None) -> str:
    """The table as text; reasons and changes stand below it."""
    if not rows:
        return ""
    lines = [line for line, _ in table(rows, max_share=max_share)]
    return "\n".join([*lines, *remarks(rows, max_share=max_share)])


def remarks(rows: Iterable[Row], *, max_share: float | None = None) -> list[str]:
    """What was changed and what went wrong, row by row; the same words for several rows are said once."""
    said: dict[str, list[str]] = {}
    for row in grouped(rows):
        share = [f"  needs {row.share:.0%} of the chip's VMEM, {max_share:.0%} are allowed"] \
            if exceeds(row, max_share) else []
        words = "\n".join([*share, *(f"  {change}" for change in row.changes),
                           *([f"  to keep: {row.edit}"] if row.edit else []),
                           *(f"  {line}" for line in (row.reason or "").splitlines() if line.strip())])
        if words:
            at = f" ({row.source})" if row.source else ""
            said.setdefault(words, []).append(f"{row.kernel} on {row.topology}{at}")
    return [f"\n{', '.join(dict.fromkeys(who))}:\n{words}" for words, who in said.items()]


def rich_table(rows: Sequence[Row], *, title: str, width: int, max_share: float | None = None) -> Any:
    """The table with a bar per row, for `rich.console.Console.print` on a console of `width` characters."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right" if HEADINGS.index(heading) in _NUMBERS else "left",
                         overflow="fold", no_wrap=heading != "kernel")
    drawn.add_column("of the chip", no_wrap=True)
    found = grouped(rows)
    lines = [cells(row, max_share=max_share) for row in found]
    # What the other columns and the frame take; bars get what is left.
    taken = sum(max(len(line[column]) for line in (HEADINGS, *lines)) for column in range(len(HEADINGS))) + 25
    bar_width = min(40, max(10, width - taken))
    previous = None
    for row, (kernel, *rest, verdict) in zip(found, lines, strict=True):
        key = (row.program, row.kernel, row.source)
        if previous not in (None, key):
            drawn.add_section()
        style = "bold red" if exceeds(row, max_share) else _STYLES.get(row.verdict, "red")
        drawn.add_row("" if key == previous else kernel, *rest, Text(verdict, style=style), bar(row, bar_width))
        previous = key
    return drawn


def bar(row: Row, width: int) -> Any:
    """`width` characters: windows, scratch, the rest; `|` where the limit is; red where the need leaves the chip."""
    from rich.text import Text

    if not row.capacity_bytes or row.need_bytes is None:
        return Text("")
    scale = width / max(row.capacity_bytes, row.need_bytes)
    text = Text()
    ends = [row.windows_bytes, row.windows_bytes + row.scratch_bytes, row.need_bytes]
    limit = None if row.limit_bytes is None else min(width - 1, int(row.limit_bytes * scale))
    for column in range(width):
        if column == limit:
            text.append("|", style="bold")
        elif column < ends[2] * scale:
            colour = "blue" if column < ends[0] * scale else "dark_orange" if column < ends[1] * scale else "magenta"
            text.append("█", style="red" if column >= row.capacity_bytes * scale else colour)
        else:
            text.append("·", style="dim")
    return text
