"""One self-contained page that shows where the VMEM of each kernel goes.

The page loads nothing: style and script are in it, and its own content policy forbids every request. Without script it
is still a complete table; the script sorts, filters and opens the details for print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from jax_vmem_guard.chips import MiB
from jax_vmem_guard.rows import GOOD, VERDICT_WORDS, Row, summary

PARTS = (("windows", "windows (blocks x buffers)"), ("scratch", "scratch operands"),
         ("body", "allocations in the body"), ("spills", "spill slots and compiler internals"),
         ("unsplit", "not itemised"))
"""Segments of a bar in the order they are drawn: CSS class (`Row.<class>_bytes`), words for the legend."""

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing. Its own style, script and empty icon are in it."""


def page(rows: Sequence[Row], *, title: str, notes: Iterable[str] = (),
         instructions: Iterable[tuple[str, int | None, int | None]] = ()) -> str:
    """The page as HTML text.

    Args:
      rows: one per kernel and chip; drawn in this order until the reader sorts.
      title: heading.
      notes: sentences under the heading.
      instructions: (HLO instruction, bytes used, limit) of a compiled program.
    """
    files = resources.files("jax_vmem_guard")
    style = files.joinpath("report_page.css").read_text(encoding="utf-8")
    script = files.joinpath("report_page.js").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p>{escape(summary(rows))}</p>
{"".join(f'<p class="soft">{escape(note)}</p>' for note in notes)}
{_table(rows)}
{_instructions(tuple(instructions))}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    used = [(css, words) for css, words in PARTS if any(getattr(row, f"{css}_bytes") for row in rows)]
    legend = "".join(f'<li><span class="swatch {css}"></span>{escape(words)}</li>' for css, words in used)
    return f"""
<ul class="legend" aria-label="Legend">{legend}
<li><span class="swatch mark limit"></span>limit in force</li>
<li><span class="swatch mark capacity"></span>capacity of the chip</li>
</ul>
<div class="controls">
<label>Find <input type="search" id="search" placeholder="name, chip or source"></label>
<label><input type="checkbox" id="trouble"> only what does not fit as it is</label>
<span id="status" role="status" class="soft"></span>
</div>
<div class="scroll">
<table class="kernels">
<caption>Scoped VMEM in MiB. Press a heading to sort.</caption>
<thead><tr>
{_heading("name", "Kernel", "text")}{_heading("chip", "Chip", "text")}
<th scope="col" class="plain">VMEM</th>
{_heading("need", "Need", "number")}{_heading("limit", "Limit", "number")}{_heading("capacity", "Capacity", "number")}
{_heading("headroom", "Headroom", "number")}{_heading("verdict", "Verdict", "text")}
</tr></thead>
{"".join(_kernel(row) for row in rows)}
</table>
</div>"""


def _heading(key: str, words: str, kind: str) -> str:
    css = ' class="number"' if kind == "number" else ""
    return (f'<th scope="col"{css} data-key="{key}" data-type="{kind}">'
            f'<button type="button">{escape(words)}</button></th>')


def _kernel(row: Row) -> str:
    text = " ".join(filter(None, (row.kernel, row.topology, row.source, row.program, VERDICT_WORDS[row.verdict])))
    data = {"name": row.kernel, "chip": row.topology, "need": row.need_bytes, "limit": row.limit_bytes,
            "capacity": row.capacity_bytes, "headroom": row.headroom_bytes, "verdict": row.verdict,
            "text": text.lower()}
    attributes = " ".join(f'data-{key}="{escape("" if value is None else str(value))}"' for key, value in data.items())
    where = " · ".join(filter(None, (row.program, row.source)))
    expected = "" if row.measured or row.need_bytes is None else '<abbr title="expected, not compiled">~</abbr>'
    return f"""<tbody class="kernel" {attributes}>
<tr class="facts">
<td class="wide"><div class="name">{escape(row.kernel)}</div><div class="source"><code>{escape(where)}</code></div></td>
<td data-label="Chip">{escape(row.topology)}</td>
<td class="bar">{_bar(row)}</td>
<td class="number" data-label="Need">{expected}{_mib(row.need_bytes)}</td>
<td class="number" data-label="Limit">{_mib(row.limit_bytes)}</td>
<td class="number" data-label="Capacity">{_mib(row.capacity_bytes)}</td>
<td class="number" data-label="Headroom">{_mib(row.headroom_bytes)}</td>
<td class="wide"><span class="verdict {row.verdict}">{escape(VERDICT_WORDS[row.verdict])}</span></td>
</tr>
{_more(row)}</tbody>
"""


def _bar(row: Row) -> str:
    """The stacked bar; its full width is the capacity, or the need where that is more."""
    full = max(row.need_bytes or 0, row.limit_bytes or 0, row.capacity_bytes or 0)
    if not full:
        return '<span class="soft">unknown</span>'
    parts = [(css, words, getattr(row, f"{css}_bytes")) for css, words in PARTS if getattr(row, f"{css}_bytes")]
    label = "; ".join([*(f"{words} {_mib(size)}" for _, words, size in parts), f"need {_mib(row.need_bytes)}",
                       f"limit {_mib(row.limit_bytes)}", f"capacity {_mib(row.capacity_bytes)} MiB"])
    # A bar never leaves its track, also where an estimate of the parts is above the measured need.
    scale = 100 / max(full, sum(size for _, _, size in parts))
    segments = "".join(f'<span class="part {css}" style="width: {scale * size:.3f}%" '
                       f'title="{escape(words)}: {_mib(size)} MiB"></span>' for css, words, size in parts)
    marks = "".join(f'<span class="mark {css}" style="left: {scale * size:.3f}%"></span>'
                    for css, size in (("limit", row.limit_bytes), ("capacity", row.capacity_bytes)) if size)
    return (f'<div class="track" role="img" aria-label="{escape(label)}"><div class="parts">{segments}</div>'
            f"{marks}</div>")


def _more(row: Row) -> str:
    inside = "".join(f"<p>{escape(line)}</p>" for line in (row.reason, *row.changes) if line)
    if row.edit:
        inside += f"<p>Suggested edit:</p><pre>{escape(row.edit)}</pre>"
    if row.items:
        items = "".join(
            f"<tr><td>{escape(item.what)}</td><td><code>{escape(item.shape)}</code></td><td>{escape(item.dtype)}</td>"
            f'<td class="number">{item.buffers}</td><td class="number">{_mib(item.bytes)}</td>'
            f"<td>{escape(item.remark)}</td></tr>" for item in row.items)
        inside += ('<div class="scroll"><table class="items"><thead><tr><th>Buffer</th><th>Block</th><th>Type</th>'
                   f"<th>Buffers</th><th>MiB</th><th></th></tr></thead><tbody>{items}</tbody></table></div>")
    if not inside:
        return ""
    is_open = "" if row.verdict in GOOD else " open"
    return (f'<tr class="more"><td class="detail" colspan="8"><details{is_open}><summary>Where the bytes go</summary>'
            f"{inside}</details></td></tr>\n")


def _instructions(rows: tuple[tuple[str, int | None, int | None], ...]) -> str:
    if not rows:
        return ""
    body = "".join(f'<tr><td><code>{escape(name)}</code></td><td class="number">{_mib(used)}</td>'
                   f'<td class="number">{_mib(limit)}</td></tr>' for name, used, limit in rows)
    return ('<h2>HLO instructions with scoped VMEM</h2><div class="scroll"><table class="items">'
            "<thead><tr><th>Instruction</th><th>Used, MiB</th><th>Limit, MiB</th></tr></thead>"
            f"<tbody>{body}</tbody></table></div>")


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MiB:.2f}"
