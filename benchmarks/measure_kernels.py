"""Measures what the real compiler gives each kernel of the zoo, alone, with the limit at the chip's capacity.

    python benchmarks/measure_kernels.py OUTPUT.jsonl [--chips v5e,v6e,tpu7x] [--families a,b]
    python benchmarks/measure_kernels.py OUTPUT.jsonl --pack tests/data/kernels.jsonl.xz

A row holds the kernel itself (its custom call, locations stripped), so that it can be read again without tracing it.
Rows already in OUTPUT are not measured again. `--pack` measures nothing: it puts the rows of OUTPUT in the place of the
zoo's rows in the data file of the tests; the rows of the first survey stay.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import lzma
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from kernel_zoo import FAMILIES, Family  # noqa: E402

from jax_vmem_guard import _jax, custom_call  # noqa: E402
from jax_vmem_guard.chips import Chip, chip_named  # noqa: E402
from jax_vmem_guard.kernels import read_kernels  # noqa: E402
from jax_vmem_guard.used_vmem import used_scoped_vmem  # noqa: E402


@functools.cache
def device_of(chip: Chip) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]


def lower(family: Family, sizes: dict[str, Any], chip: Chip) -> _jax.Program:
    fun, arrays = family.build(**sizes)
    device = device_of(chip)
    sharding = jax.sharding.SingleDeviceSharding(device)
    with _jax.answering_for_chip(device):
        placed = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
        computation = jax.jit(fun).lower(*placed)._lowering
    return _jax.Program(computation, type(computation).compile)


def measure(family: Family, sizes: dict[str, Any], chip: Chip) -> list[dict[str, Any]]:
    program = lower(family, sizes, chip)
    rows = []
    for kernel, op in zip(read_kernels(program.module), custom_call.custom_calls(program.module), strict=True):
        start = time.perf_counter()
        row = {"family": family.name, "sizes": sizes, "chip": chip.name, "held_back": family.held_back,
               "name": kernel.name, "call": shipped_call(op)}
        try:
            executable = program.compile_alone(at_capacity(custom_call.isolate(program.module, kernel.ordinal), chip))
            row["used_bytes"] = max(i.used_bytes for i in used_scoped_vmem(executable) if i.is_kernel)
        except Exception as error:  # a kernel too big for the chip is a row too
            row["error"] = str(error)[:300]
        rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
    return rows


def at_capacity(module: Any, chip: Chip) -> Any:
    def change(_: int, config: dict[str, Any]) -> bool:
        config["scoped_memory_configs"] = [{"memory_space": 1, "offset": 0, "size": chip.capacity_bytes}]
        return True
    return custom_call.edit(module, change)


def shipped_call(op: Any) -> dict[str, Any]:
    """What a custom call says, without locations: enough to write a module around it."""
    from jaxlib.mlir.passmanager import PassManager

    config = custom_call.read_config(op)
    call = config["custom_call_config"]
    for name in ("debug_locations", "cost_estimate"):
        call.pop(name, None)
    module = _jax.parse_shipped_mosaic(base64.b64decode(call["body"]))
    with module.context:
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    call["body"] = base64.b64encode(_jax.mosaic_bytecode(module)).decode()
    return {"config": config, "operands": [str(v.type) for v in op.operands],
            "results": [str(v.type) for v in op.results], "aliases": sorted(custom_call.aliases(op).items())}


def pack(rows: list[dict[str, Any]], data: Path) -> None:
    with lzma.open(data, "rt") as lines:
        survey = [row for row in map(json.loads, lines) if row["family"] not in FAMILIES]
    fields = ("family", "sizes", "chip", "held_back", "name", "used_bytes", "tags", "call")
    packed = survey + [{name: row.get(name) for name in fields} for row in rows]
    with lzma.open(data, "wt", preset=9) as lines:
        lines.write("\n".join(map(json.dumps, packed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--chips", default="v5e,v6e,tpu7x")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--pack", type=Path, metavar="DATA")
    arguments = parser.parse_args()
    known = [json.loads(line) for line in arguments.output.read_text().splitlines()] if arguments.output.exists() else []
    if arguments.pack is not None:
        pack(known, arguments.pack)
        return
    done = {(row["family"], json.dumps(row["sizes"]), row["chip"]) for row in known}
    with arguments.output.open("a") as output:
        for name in arguments.families.split(","):
            for sizes in FAMILIES[name].sizes:
                for chip in map(chip_named, arguments.chips.split(",")):
                    if (name, json.dumps(sizes), chip.name) in done:
                        continue
                    try:
                        rows = measure(FAMILIES[name], sizes, chip)
                    except Exception as error:
                        print(f"{name} {sizes} {chip.name}: {str(error)[:300]}", file=sys.stderr)
                        continue
                    for row in rows:
                        output.write(json.dumps(row) + "\n")
                        print(name, sizes, chip.name, row["name"], row.get("used_bytes", row.get("error", "")[:80]),
                              row["seconds"], flush=True)
                    output.flush()


if __name__ == "__main__":
    main()
