"""Asks the compiler about one kernel at a time.

A kernel compiled alone with its limit at the chip's capacity leaves XLA nothing to place in VMEM, so what it reports as
used is the kernel's plain need, to the byte (measured on 1021 kernels, v2 to tpu7x, libtpu 0.0.52).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.diagnosis import diagnose
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.locks import ForkSafeLock
from jax_vmem_guard.planner import Need
from jax_vmem_guard.used_vmem import used_scoped_vmem


def cannot_probe(kernel: Kernel) -> str | None:
    """Why the kernel cannot be compiled alone, or None where it can."""
    if not kernel.readable:
        return "its code cannot be read"
    if kernel.communicates:
        return "it communicates with other devices"
    if any(kernel.allow_input_fusion):
        return "XLA may fuse the producers of its operands into it"
    return None


class Prober:
    """Compiles kernels alone, in parallel, and remembers the answers of this process.

    The answers are shared by all programs: they depend only on the kernel's code, the chip and the compiler options.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._known: dict[Any, Need] = {}

    def needs(self, program: _jax.Program, modules: Mapping[Any, Any]) -> tuple[dict[Any, Need], int]:
        """The needs of isolated kernels.

        Args:
          program: the program the kernels come from; its chip and options are used.
          modules: key -> module that holds one kernel. Keys identify kernel and changes.

        Returns:
          The need for each key, and how many compiles that took.
        """
        scope = (program.device_kind, tuple(sorted((k, str(v)) for k, v in program.compiler_options.items())))
        with self._lock:
            known = {key: self._known[scope, key] for key in modules if (scope, key) in self._known}
        missing = [key for key in modules if key not in known]
        if missing:
            with ThreadPoolExecutor(max_workers=min(len(missing), os.cpu_count() or 1)) as threads:
                answers = threads.map(lambda key: _need(program, modules[key]), missing)
            fresh = dict(zip(missing, answers, strict=True))
            with self._lock:
                self._known.update({(scope, key): need for key, need in fresh.items()})
            known |= fresh
        return {key: known[key] for key in modules}, len(missing)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


def _need(program: _jax.Program, module: Any) -> Need:
    try:
        executable = program.compile_alone(module)
    except Exception as error:
        diagnosis = diagnose(error)
        if diagnosis is None:
            return Need(bytes=None, fits=False, problem=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return Need(bytes=diagnosis.size_bytes, fits=False)
    # A copy of a colored operand or result uses scoped VMEM too (8 MiB on v5p): what counts is the kernel.
    used = [row.used_bytes for row in used_scoped_vmem(executable) if row.is_kernel]
    if not used:
        return Need(bytes=None, fits=False, problem="the compiler did not report what it used")
    return Need(bytes=max(used), fits=True)


prober = Prober()
