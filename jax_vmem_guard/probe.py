"""Asks the compiler about one kernel at a time.

A kernel compiled alone with its limit at the chip's capacity leaves XLA nothing to place in VMEM, so what it reports as
used is the kernel's plain need, to the byte (measured on 1021 kernels, v2 to tpu7x, libtpu 0.0.52).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.chips import chip_for_device_kind
from jax_vmem_guard.diagnosis import diagnose
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.learned import LEARNED
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
        self._answers: dict[Any, Future[Need]] = {}
        self._unasked: set[Any] = set()  # started ahead; whoever asks first has them counted
        # A forked child has none of the threads that would answer what is still open.
        os.register_at_fork(after_in_child=self.clear)

    def start(self, program: _jax.Program, modules: Mapping[Any, Any]) -> None:
        """Begin to compile isolated kernels while the caller does something else; `needs` waits for them.

        The answers that are known, or under way already, are not asked for again.
        """
        with self._lock:
            missing = [key for key in modules if _scoped(program, key) not in self._answers]
            if missing:
                threads = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), "jax_vmem_guard_probe")
                for key in missing:
                    self._answers[_scoped(program, key)] = threads.submit(_need, program, modules[key])
                    self._unasked.add(_scoped(program, key))
                threads.shutdown(wait=False)

    def needs(self, program: _jax.Program, modules: Mapping[Any, Any]) -> tuple[dict[Any, Need], int]:
        """The needs of isolated kernels.

        Args:
          program: the program the kernels come from; its chip and options are used.
          modules: key -> module that holds one kernel. Keys identify kernel and changes.

        Returns:
          The need for each key, and how many compiles that took.
        """
        self.start(program, modules)
        with self._lock:
            scoped = {key: _scoped(program, key) for key in modules}
            answers = {key: self._answers[scoped[key]] for key in modules}
            asked_first = self._unasked.intersection(scoped.values())
            self._unasked -= asked_first
        try:
            return {key: answer.result() for key, answer in answers.items()}, len(asked_first)
        except BaseException:  # an interrupt, in a probe or here, is no answer: the next one who asks gets a new probe
            self._forget_unanswered(scoped.values())
            raise

    def _forget_unanswered(self, keys: Iterable[Any]) -> None:
        with self._lock:
            for key in keys:
                answer = self._answers.get(key)
                if answer is not None and answer.done() and (answer.cancelled() or answer.exception() is not None):
                    del self._answers[key]

    def clear(self) -> None:
        with self._lock:
            self._answers.clear()
            self._unasked.clear()


def _scoped(program: _jax.Program, key: Any) -> tuple[Any, ...]:
    return program.device_kind, tuple(sorted((k, str(v)) for k, v in program.compiler_options.items())), key


def _need(program: _jax.Program, module: Any) -> Need:
    try:
        executable = program.compile_alone(module)
    except Exception as error:
        diagnosis = diagnose(error)
        if diagnosis is None:
            return Need(bytes=None, fits=False, problem=f"{type(error).__name__}: {str(error).strip()[:200]}")
        return Need(bytes=diagnosis.size_bytes, fits=False)
    # A copy of a colored operand or result uses scoped VMEM too (8 MiB on v5p): what counts is the kernel.
    used = [row.used_bytes for row in used_scoped_vmem(executable) if row.is_kernel]
    if not used:
        return Need(bytes=None, fits=False, problem="the compiler did not report what it used")
    _learn(program, module, max(used))
    return Need(bytes=max(used), fits=True)


def _learn(program: _jax.Program, module: Any, used: int) -> None:
    """Let the answer correct what is expected of the same code at other block sizes."""
    chip = chip_for_device_kind(program.device_kind)
    kernels = read_kernels(module)
    if chip is not None and len(kernels) == 1:
        LEARNED.observe(kernels[0], chip, used)


prober = Prober()
