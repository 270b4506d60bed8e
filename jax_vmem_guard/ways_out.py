"""What to do about a VMEM failure: for each kind the ways out, least change first."""

from __future__ import annotations

from jax_vmem_guard.breakdown import Allocation
from jax_vmem_guard.chips import Chip, KiB, MiB
from jax_vmem_guard.diagnosis import Diagnosis

#: A limit a little above the need, for a need that is stated as a lower bound and rounded.
_MARGIN = 1.10


def ways_out(diagnosis: Diagnosis, chips: tuple[Chip, ...]) -> list[str]:
    """Ways out of the failure, least change first; a way may have several lines.

    Args:
      diagnosis: what the compiler said.
      chips: the chip, or those it may have been.
    """
    if diagnosis.form == "pinned":
        return _unpin(diagnosis)
    if diagnosis.is_kernel is False:
        return _not_a_kernel(diagnosis, chips)
    ways = [way for way in (
        _raise_limit(diagnosis, chips) if diagnosis.form == "limit" else None,
        _smaller_blocks(diagnosis),
        _single_buffers(diagnosis),
        _fewer_spills(diagnosis),
        _leave_in_hbm(diagnosis),
    ) if way]
    if diagnosis.is_kernel is None and diagnosis.form == "limit" and diagnosis.instruction:
        ways += [f"If it is not a kernel of yours: {way[0].lower()}{way[1:]}"
                 for way in _not_a_kernel(diagnosis, chips)[:-2]]
    return ways


def _most_and_least(chips: tuple[Chip, ...]) -> tuple[int, int]:
    capacities = [c.capacity_bytes for c in chips] or [0]
    return max(capacities), min(capacities)


def suggested_limit(diagnosis: Diagnosis, chips: tuple[Chip, ...]) -> int | None:
    """Bytes: the stated need plus a margin in whole MiB (KiB below one MiB), at most the largest candidate's capacity.

    None where the text states no need, or one above what any candidate has.
    """
    most, _ = _most_and_least(chips)
    need = diagnosis.size_bytes
    if need is None or need > most:
        return None
    unit = MiB if need >= MiB else 16 * KiB
    return min(-(-int(need * _MARGIN) // unit) * unit, most)


def _raise_limit(d: Diagnosis, chips: tuple[Chip, ...]) -> str | None:
    limit = suggested_limit(d, chips)
    most, least = _most_and_least(chips)
    if limit is None:
        if d.size_bytes is not None:
            return None
        return ("Raise the kernel's own limit, in its `pallas_call`:\n"
                f"compiler_params=pltpu.CompilerParams(vmem_limit_bytes={least // MiB} * 1024 * 1024)")
    number = f"{limit // MiB} * 1024 * 1024" if limit % MiB == 0 and limit >= MiB else str(limit)
    unless = ", ".join(c.name for c in chips if c.capacity_bytes < limit)
    more = "If it then fails with a larger number, raise it to that number: the first one was a lower bound."
    return (f"Raise the kernel's own limit, in its `pallas_call`{f' (not enough room on {unless})' if unless else ''}:\n"
            f"compiler_params=pltpu.CompilerParams(vmem_limit_bytes={number})\n{more}")


def _smaller_blocks(d: Diagnosis) -> str:
    largest = _largest(d, ("input window", "output window", "scratch"))
    which = f"; the largest is {_named(largest)}, {largest.size_bytes / MiB:.2f} MiB" if largest else ""
    return f"Make blocks or scratch smaller: half the rows of a block is half of its window{which}."


def _single_buffers(d: Diagnosis) -> str | None:
    """Single buffering, with what it saves where the table tells."""
    how = "`pl.BlockSpec(..., pipeline_mode=pl.Buffered(1))`"
    advice = "inputs whose block changes least often lose least speed"
    if not d.breakdown:
        return f"Keep one buffer instead of two for a window: {how}; {advice}."
    double = [row for row in d.breakdown if "2 buffering levels" in row.tag]
    if not double:
        return None
    if d.form == "allocation":
        left = double[0].size_bytes // 2
        fits = d.capacity_bytes is not None and left < d.capacity_bytes
        return f"Keep one buffer instead of two for it: {how} leaves {left / MiB:.2f} MiB." if fits else None
    saved = sum(row.size_bytes for row in double) // 2
    left = (d.size_bytes or 0) - saved
    fits = d.capacity_bytes is not None and d.size_bytes is not None and left <= d.capacity_bytes
    outcome = f"; for all of them that leaves {left / MiB:.2f} MiB, which {'fits' if fits else 'is still too much'}"
    return f"Keep one buffer instead of two for a window: {how}{outcome if d.size_bytes else ''}; {advice}."


def _fewer_spills(d: Diagnosis) -> str | None:
    spilled = sum(row.size_bytes for row in d.breakdown if row.kind == "spill slots")
    if not spilled:
        return None
    return (f"Let the body hold fewer values at once ({spilled / MiB:.2f} MiB are register spill slots): work on a few "
            "rows at a time in a `fori_loop`,\nand load a reference again instead of keeping what was loaded.")


def _leave_in_hbm(d: Diagnosis) -> str | None:
    if d.form == "limit":
        return None
    return ("Leave a large operand in HBM (`memory_space=pl.ANY`) and copy the parts that are needed by hand, or let XLA"
            "\nplace a whole operand in VMEM (`pltpu.with_memory_space_constraint`) where there is no grid over it.")


def _unpin(d: Diagnosis) -> list[str]:
    which = ", ".join(f"`{b}`" for b in d.pinned_buffers) or "the largest buffer"
    return [f"Unpin {which}: take `pltpu.with_memory_space_constraint(x, pltpu.VMEM)`, or the memory space of the "
            "operand or result, away.",
            "Pin a part of it (a slice), so that everything that is pinned at one time fits the chip.",
            "Unpin other buffers that are alive at the same time."]


def _not_a_kernel(d: Diagnosis, chips: tuple[Chip, ...]) -> list[str]:
    ways = []
    limit = suggested_limit(d, chips)
    if d.form == "limit" and limit is not None:
        low = all(d.limit_bytes is not None and d.limit_bytes < c.default_limit_bytes for c in chips)
        below = "The limit is below the chip's default: " if low else ""
        ways.append(
            f"{below}{'r' if low else 'R'}aise, or take away, the limit of the compile:\n"
            f'jax.jit(f, compiler_options={{"xla_tpu_scoped_vmem_limit_kib": "{limit // KiB}"}})\n'
            "and look for the same flag in LIBTPU_INIT_ARGS and XLA_FLAGS.")
    ways.append(
        "If nobody set a limit, this is most likely a bug of the compiler: report it to XLA "
        "(github.com/openxla/xla/issues).\nJAX_VMEM_GUARD_BUG_REPORT_DIR=<folder> makes the guard write a bundle to "
        "attach: program, HLO, versions, and a script that reproduces it without a TPU.")
    line = f" ({d.source})" if d.source else ""
    ways.append(f"Meanwhile write the operation{line} in another form: split it into smaller parts, or change the layout or "
                "dtype it works on.")
    return ways


def _largest(d: Diagnosis, kinds: tuple[str, ...]) -> Allocation | None:
    rows = [row for row in d.breakdown if row.kind in kinds]
    return max(rows, key=lambda row: row.size_bytes) if rows else None


def _named(row: Allocation) -> str:
    digits = row.tag.split("operator ", 1)[-1].split(".", 1)[0] if "operator " in row.tag else ""
    return f"the window of {digits}" if digits else row.kind
