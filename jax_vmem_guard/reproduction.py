"""Texts of a bug report: the script that shows the failure again, and the README beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from typing import Any

from jax_vmem_guard.chips import MiB
from jax_vmem_guard.diagnosis import Diagnosis

_SCRIPT = '''"""Compiles program.mlir for {topology} and shows the compiler's error. No TPU is needed.

    pip install jax=={jax} jaxlib=={jaxlib} libtpu=={libtpu}
    python reproduce.py

Exit code: 0 the same error, 1 the program compiles, 2 another error.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
for variable in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
    os.environ.pop(variable, None)
os.environ.update({flags})

import pathlib
import re
import sys
from typing import Any

OPTIONS = {options}


{function}

def first_sentence(message: str) -> str:
    """The error without what follows the numbers."""
    return re.split(r"It should not be possible|\\n\\n", message)[0].strip()


if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    expected = (here / "message.txt").read_text()
    try:
        compile_for_topology((here / "program.mlir").read_text(), {topology!r}, {num_replicas}, {num_partitions}, OPTIONS)
    except Exception as error:
        print(error)
        sys.exit(0 if first_sentence(str(error)) == first_sentence(expected) else 2)
    print("the program compiles: the failure is not there with these versions")
    sys.exit(1)
'''


def script(function: str, facts: Mapping[str, Any]) -> str:
    """`reproduce.py`: `function` is the source of the function that compiles."""
    flags = {name: " ".join(values) for name, values in facts["flags"].items() if values}
    return _SCRIPT.format(
        topology=facts["topology"], function=function, flags=flags, options=pformat(dict(facts["compiler_options"])),
        num_replicas=facts["num_replicas"], num_partitions=facts["num_partitions"],
        **{name: facts["versions"][name] for name in ("jax", "jaxlib", "libtpu")})


def readme(diagnosis: Diagnosis, facts: Mapping[str, Any], *, hlo: tuple[str, ...], constants: tuple[int, int]) -> str:
    """`README.md`: what failed, how to see it again, what each file is."""
    what = f"`{diagnosis.instruction}`" if diagnosis.instruction else "an instruction"
    where = f", {diagnosis.op_name}" if diagnosis.op_name else ""
    source = f" (source: {diagnosis.source.rsplit('/', 1)[-1]})" if diagnosis.source else ""
    kind = ("is not a Pallas kernel, so no source of the user's sets its size" if diagnosis.is_kernel is False else
            "does not fit, and the message does not say whether it is a Pallas kernel")
    lines = [
        f"# Scoped VMEM: {what} does not fit on {facts['chip']}",
        "",
        f"The instruction {what}{where}{source} {kind}.",
        "",
        "To see it again, on any Linux machine with these versions:",
        "",
        f"    pip install jax=={facts['versions']['jax']} jaxlib=={facts['versions']['jaxlib']} "
        f"libtpu=={facts['versions']['libtpu']}",
        "    python reproduce.py",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts["versions"].items()),
        f"| topology | {facts['topology']} |",
        f"| devices | {facts['num_devices']} |",
        *(f"| compiler option | {name}={value} |" for name, value in facts["compiler_options"].items()),
        *(f"| {name} | {' '.join(values)} |" for name, values in facts["flags"].items()),
        "",
        "* `message.txt`: the compiler's error",
        "* `program.mlir`: the program as StableHLO; paths in its source locations are shortened",
        "* `environment.json`: versions, topology, options and flags that were set",
    ]
    lines += [f"* `hlo/{name}`" for name in hlo] or ["* the compiler dumped no HLO"]
    if constants[0]:
        lines += ["", f"The program has {constants[0]} constants of more than 1 KiB in it ({constants[1] / MiB:.2f} MiB): "
                  "arrays it closed over. Look at them before you publish this folder."]
    return "\n".join(lines) + "\n"
