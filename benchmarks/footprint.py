"""How near the footprint comes to what the real compiler used, on measured kernels; no compiling.

    python benchmarks/footprint.py [--families] [--chips]

Rows are kernels compiled alone with the limit at the chip's capacity (tests/data/kernels.jsonl.xz). "Held back" are
families that were chosen before the model of the spill slots was first fitted and never used to fit it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from measured import MeasuredKernel, measured_kernels  # noqa: E402

from jax_vmem_guard.footprint import Footprint, footprint  # noqa: E402
from jax_vmem_guard.kernel_analysis import analyse, held_registers_of  # noqa: E402
from jax_vmem_guard.kernel_body import Op  # noqa: E402
from jax_vmem_guard.kernels import Kernel  # noqa: E402
from jax_vmem_guard.learned import Learned  # noqa: E402
from jax_vmem_guard.matmul_pressure import matmul_shape  # noqa: E402
from jax_vmem_guard.mosaic import decode_kernel, forget_kernels  # noqa: E402
from jax_vmem_guard.report_text import Table, render  # noqa: E402
from jax_vmem_guard.tiling import element_bits  # noqa: E402

GOOD = (0.95, 1.15)  # of the need


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured kernel, its footprint, and that footprint after learning from the family's other sizes."""

    measured: MeasuredKernel
    kernel: Kernel
    used: int
    need: Footprint
    learned: Footprint


def rows() -> list[Row]:
    """Every measured kernel that fits its chip."""
    read = [(m, m.kernel, m.used_bytes) for m in measured_kernels() if m.used_bytes is not None]
    result = []
    for measured, kernel, used in read:
        others = Learned()
        for m, k, u in read:
            same_family = (m.family, m.name, m.chip) == (measured.family, measured.name, measured.chip)
            if same_family and k.fingerprint != kernel.fingerprint:
                others.observe(k, m.chip, u)
        result.append(Row(measured=measured, kernel=kernel, used=used, need=footprint(kernel, measured.chip),
                          learned=others.footprint(kernel, measured.chip)))
    return result


def within(ratios: Iterable[float], low: float, high: float = math.inf) -> str:
    values = list(ratios)
    return f"{100 * sum(low <= r <= high for r in values) / len(values):.1f} %"


def spread(ratios: Iterable[float]) -> tuple[str, str, str]:
    values = sorted(ratios)
    return f"{values[0]:.2f}", f"{statistics.median(values):.2f}", f"{values[-1]:.2f}"


def accuracy(title: str, groups: dict[str, list[Row]]) -> Table:
    lines = []
    for name, group in groups.items():
        expected = [r.need.expected_bytes / r.used for r in group]
        at_most = [r.need.at_most_bytes / r.used for r in group]
        lines.append((
            name, str(len(group)), within(expected, *GOOD), *spread(expected),
            within((r.learned.expected_bytes / r.used for r in group), *GOOD), within(at_most, 1), within(at_most, 0, 1.5),
            str(sum(r.need.certain_bytes > r.used for r in group))))
    header = ("", "kernels", "expected -5/+15 %", "least", "median", "most", "after learning", "at most covers",
              "at most <= 1.5x", "certain above")
    return Table(title=title, header=header, rows=tuple(lines), numbers=frozenset(header[1:]))


def grouped(all_rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in all_rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


# ---- what other projects compute, by their arithmetic


def unpadded(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * element_bits(dtype) // 8


def blocks_once(kernel: Kernel) -> int:
    """The blocks and the scratch, one of each, without padding."""
    scratch = sum(unpadded(r.shape, r.dtype) for r in kernel.scratch if r.memory_space == "vmem")
    return scratch + sum(unpadded(w.block_shape, w.dtype) for w in kernel.windows if w.buffers)


def blocks_twice(kernel: Kernel) -> int:
    """Two of every block and the scratch, without padding: estimates in inference servers' ragged attention kernels."""
    windows = sum(unpadded(w.block_shape, w.dtype) for w in kernel.windows if w.buffers)
    return blocks_once(kernel) + windows


def blocks_and_scores(kernel: Kernel) -> int:
    """The same and one f32 array for every matmul's result: estimates of flash attention with score temporaries."""
    analysis = analyse(kernel.code) if kernel.code is not None else None
    return blocks_twice(kernel) + sum(4 * n for n in matmul_results(analysis.ops if analysis else ()))


def matmul_results(ops: tuple[Op, ...]) -> Iterable[int]:
    for op in ops:
        sizes = matmul_shape(op) if op.name == "tpu.matmul" else None
        if sizes is not None:
            yield sizes.batch * sizes.rows * sizes.columns
        for block in op.blocks:
            yield from matmul_results(block)


FORMULAS: dict[str, Callable[[Kernel], int]] = {
    "one of each block + scratch": blocks_once,
    "two of each block + scratch": blocks_twice,
    "two of each + scores in f32": blocks_and_scores,
    "30 % of the limit for two of each": lambda kernel: math.ceil(blocks_twice(kernel) / 0.3),
}


def compared(all_rows: list[Row]) -> Table:
    lines = []
    contenders: dict[str, Callable[[Row], int]] = {
        "jax_vmem_guard, expected": lambda row: row.need.expected_bytes,
        "jax_vmem_guard, at most": lambda row: row.need.at_most_bytes,
    }
    contenders |= {name: lambda row, f=formula: f(row.kernel) for name, formula in FORMULAS.items()}
    for name, estimate in contenders.items():
        ratios = [estimate(row) / row.used for row in all_rows]
        lines.append((name, within(ratios, *GOOD), *spread(ratios), within(ratios, 1), within(ratios, 1, 1.5)))
    header = ("estimate / need", "-5/+15 %", "least", "median", "most", "covers", "covers, <= 1.5x")
    return Table(title=f"Against other formulas, {len(all_rows)} kernels", header=header, rows=tuple(lines),
                 numbers=frozenset(header[1:]))


def timing() -> Table:
    """Milliseconds from a kernel's bytecode to its footprint, nothing cached; and the second time.

    Runs before the other tables: decoding slows down where hundreds of decoded kernels are kept, as they need them.
    """
    lines = []
    gc.disable()  # as timeit does
    families: dict[str, list[MeasuredKernel]] = {}
    for measured in measured_kernels():
        if any(word in measured.family for word in ("flash", "splash", "paged", "gmm", "attention")):
            families.setdefault(measured.family, []).append(measured)
    for name, group in sorted(families.items()):
        first, again = [], []
        for measured in group[::max(1, len(group) // 6)]:
            kernel = dataclasses.replace(measured.kernel, code=None)
            body = measured.call["config"]["custom_call_config"]["body"]
            forget_kernels()
            analyse.cache_clear()
            held_registers_of.cache_clear()
            for times in (first, again):
                start = time.process_time()
                footprint(dataclasses.replace(kernel, code=decode_kernel(body)), measured.chip)
                times.append(1e3 * (time.process_time() - start))
        lines.append((name, f"{statistics.median(first):.1f}", f"{max(first):.1f}", f"{statistics.median(again):.2f}"))
    gc.enable()
    header = ("family", "median ms", "most ms", "second time ms")
    return Table(title="Time of a footprint (processor time)", header=header, rows=tuple(lines),
                 numbers=frozenset(header[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", action="store_true", help="a row for each family")
    parser.add_argument("--chips", action="store_true", help="a row for each chip")
    arguments = parser.parse_args()
    times = timing()
    everything = rows()
    sets = {"fitted": [r for r in everything if not r.measured.held_back],
            "held back": [r for r in everything if r.measured.held_back]}
    tables = [accuracy("Footprint against need", sets)]
    for name, part in sets.items():
        if arguments.families:
            tables.append(accuracy(f"By family, {name}", grouped(part, lambda r: r.measured.family)))
        if arguments.chips:
            tables.append(accuracy(f"By chip, {name}", grouped(part, lambda r: r.measured.chip.name)))
    tables += [compared(everything), times]
    print(render(tables))


if __name__ == "__main__":
    main()
