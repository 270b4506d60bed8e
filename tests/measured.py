"""Kernels with what the real compiler gave them: rows of tests/data/kernels.jsonl.xz, each read back as a `Kernel`.

A row holds a kernel's custom call (locations stripped), the chip, and the scoped VMEM the compiler used for it alone,
with the limit at the chip's capacity (jax 0.10.2, libtpu 0.0.52). Rows from the first survey also itemise it by the
compiler's own allocation tags.
"""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_vmem_guard.chips import Chip, chip_named
from jax_vmem_guard.kernels import Kernel, read_kernels

DATA = Path(__file__).parent / "data" / "kernels.jsonl.xz"


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """One row.

    Attributes:
      family: the kind of kernel.
      sizes: what it was built with.
      chip: where it was compiled for.
      held_back: its family was never used to fit the model.
      used_bytes: scoped VMEM it used; None where it does not fit the chip.
      tags: bytes by kind of allocation ("windows", "scratch", "allocas", "spills", "live"), or None; "live" is what
        was used besides spill slots, after scratch that the compiler forwards to registers is gone.
      call: the custom call: its configuration, operand and result types, aliases.
    """

    family: str
    sizes: dict[str, Any]
    chip: Chip
    held_back: bool
    used_bytes: int | None
    tags: dict[str, int] | None
    name: str
    call: dict[str, Any]

    @property
    def kernel(self) -> Kernel:
        (kernel,) = read_kernels(stablehlo(self.call, self.name))
        return kernel

    def __str__(self) -> str:
        return f"{self.family} {self.name} {json.dumps(self.sizes)} {self.chip.name}"


@functools.cache
def measured_kernels() -> tuple[MeasuredKernel, ...]:
    rows = []
    with lzma.open(DATA, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            rows.append(MeasuredKernel(
                family=row["family"], sizes=row["sizes"], chip=chip_named(row["chip"]), held_back=row["held_back"],
                used_bytes=row["used_bytes"], tags=row["tags"], name=row["name"], call=row["call"]))
    return tuple(rows)


def stablehlo(call: dict[str, Any], name: str) -> str:
    """A module that does nothing but make this call."""
    operands, results = call["operands"], call["results"]
    config = json.dumps(call["config"]).replace("\\", "\\\\").replace('"', '\\"')
    aliases = ", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if len(results) > 1 else ''}], "
        f"operand_index = {operand}, operand_tuple_indices = []>" for operand, result in call["aliases"])
    arguments = ", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(operands))
    values = ", ".join(f"%a{i}" for i in range(len(operands)))
    types = ", ".join(results)
    returned = ", ".join(f"%r#{i}" for i in range(len(results))) if len(results) > 1 else "%r"
    return f"""module {{
      func.func @main({arguments}) -> ({types}) {{
        %r{f':{len(results)}' if len(results) > 1 else ''} = "stablehlo.custom_call"({values}) {{
          call_target_name = "tpu_custom_call", kernel_name = "{name}", api_version = 1 : i32,
          backend_config = "{config}", output_operand_aliases = [{aliases}]
        }} : ({', '.join(operands)}) -> ({types})
        return {returned} : {types}
      }}
    }}"""
