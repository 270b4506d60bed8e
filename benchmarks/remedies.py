"""Used scoped VMEM before and after each remedy alone, as the TPU compiler reports it.

Each kernel fails at the chip's default limit. One remedy, all others switched off, repairs it; the table shows what the
kernel needs as it is and what it uses after, in MiB. No TPU is needed:

    python benchmarks/remedies.py                         # all chips, Markdown
    python benchmarks/remedies.py --chips v5e tpu7x --remedies buffering --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import jax  # noqa: E402
from kernels_on_chips import CHIPS, MiB, device, lower, only_kernel, used_by_kernels, with_changes  # noqa: E402
from kernels_that_need_less import BUFFERED, COLORED, wide  # noqa: E402

import jax_vmem_guard as vmem_guard  # noqa: E402
from jax_vmem_guard.chips import chip_named  # noqa: E402
from jax_vmem_guard.diagnosis import diagnose  # noqa: E402
from jax_vmem_guard.remedies import limit  # noqa: E402

KERNELS = {"limit": BUFFERED, "buffering": BUFFERED, "coloring": COLORED}


def need_as_it_is(program, facts):
    """Bytes the unchanged kernel needs, compiled with the chip's capacity as its limit, or what the failure says."""
    whole_chip = limit.set_to(only_kernel(program), facts.capacity_bytes, need_bytes=None, limit_bytes=0)
    try:
        (used,) = used_by_kernels(program.compile_changed(with_changes(program, whole_chip)))
        return used
    except Exception as error:
        diagnosis = diagnose(error)
        if diagnosis is None:
            raise
        return diagnosis.size_bytes


def measure(name, fun, arguments, chip, remedy):
    """One row: a kernel repaired by one remedy on one chip."""
    facts = chip_named(chip)
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    row = {"kernel": name, "chip": chip, "remedy": remedy, "limit": facts.default_limit_bytes,
           "before": need_as_it_is(lower(fun, *arguments, chip=chip), facts)}
    seen = len(vmem_guard.repairs())
    try:
        compiled = vmem_guard.jit(fun, policy=vmem_guard.Policy(remedies=(remedy,))).lower(*placed).compile()
    except Exception as error:
        if diagnose(error) is None:
            raise
        return {**row, "after": None, "change": "cannot help"}
    repairs = vmem_guard.repairs()[seen:]
    changes = "; ".join(change.after for repair in repairs for change in repair.changes)
    (used,) = used_by_kernels(compiled)
    return {**row, "after": used, "change": changes or "fits as it is: XLA places its operands"}


def markdown(rows):
    yield "| remedy | kernel | chip | limit | need before | used after | change |"
    yield "|---|---|---|---:|---:|---:|---|"
    for row in rows:
        after = "-" if row["after"] is None else f"{row['after'] / MiB:.2f}"
        yield (f"| {row['remedy']} | {row['kernel']} | {row['chip']} | {row['limit'] / MiB:.0f} "
               f"| {row['before'] / MiB:.2f} | {after} | {row['change']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", nargs="+", default=list(CHIPS))
    parser.add_argument("--remedies", nargs="+", default=["buffering", "coloring"], choices=sorted(KERNELS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(name, fun, arguments(wide(chip)), chip, remedy)
            for remedy in options.remedies for name, (fun, arguments) in KERNELS[remedy].items()
            for chip in options.chips]
    print(json.dumps(rows, indent=1) if options.json else "\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
