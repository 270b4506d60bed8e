"""For tests: compiles that run out of VMEM on demand, and tests that fail when anything had to be repaired.

  from jax_vmem_guard.testing import forbid_repairs, inject_oom

  def test_training_survives_a_kernel_that_does_not_fit():
      with inject_oom(kernel="flash_attention", times=1) as oom:
          train_step(state, batch)                # compiled here, for the first time
      assert oom.failures == 1

  @forbid_repairs()
  def test_our_kernels_fit_as_they_are():
      jax.jit(model).lower(batch).compile()

Both look at compiles. What JAX has compiled before, in an earlier test, it does not compile again: call
`jax.clear_caches()` first, or use functions of the test's own.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax

from jax_vmem_guard import _jax, hook, planner
from jax_vmem_guard.chips import Chip, chip_for_device_kind, chip_named
from jax_vmem_guard.custom_call import custom_calls, metadata_text
from jax_vmem_guard.fault_messages import FORMS, Victim, message
from jax_vmem_guard.journal import Repair, repairs
from jax_vmem_guard.kernels import read_kernels

__all__ = ["RepairsForbidden", "forbid_repairs", "inject_oom"]

_ELSEWHERE = "v5e"  # whose numbers the messages have where the program is not for a TPU


class inject_oom(contextlib.ContextDecorator):
    """Makes compiles fail as the TPU compiler fails when a kernel does not fit, on any backend.

    The exception is JAX's own (`jax.errors.JaxRuntimeError`) with the compiler's own text. With the guard installed it
    sees the failure before the caller does; without, the caller gets it as from the compiler. Counts the compiles of
    the whole process, of all threads; several can be active at once. Use it as a context manager or as a decorator.

    Args:
      kernel: the kernel that fails: its name, or a pattern as in `fnmatch` ("flash_*"). A compile counts if the program
        has such a kernel; the first such kernel is the one that fails. On a CPU a kernel is a `pallas_call`, in
        interpret mode or not.
      times: how many compiles fail; all that follow if None.
      skip: how many compiles pass before the first that fails.
      form: how they fail: "limit" (E1001: more than the scoped limit), "capacity" (more than the chip has), "allocation"
        (one buffer alone is more than that), "pinned" (too many buffers colored into VMEM).
      program: the program that fails, by the name of the jitted function, or a pattern. With `program` and without
        `kernel`, programs without kernels count too; what fails in those is a fusion.
      probes: whether the compiles of one kernel alone, which the guard makes to learn what a kernel needs, count and
        fail too.

    Attributes:
      compiles: compiles that counted, the failed ones included.
      failures: compiles that failed.
      messages: the texts, in order.

    Raises:
      ValueError: an argument is out of range; the message names what is allowed.
    """

    def __init__(self, *, kernel: str | None = None, times: int | None = None, skip: int = 0, form: str = "limit",
                 program: str | None = None, probes: bool = False):
        if form not in FORMS:
            raise ValueError(f"`form` does not know {form!r}; allowed: {', '.join(FORMS)}")
        for name, value in (("times", times), ("skip", skip)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"`{name}` must be a number of compiles, 0 or more, got {value!r}")
        self._kernel, self._program, self._probes = kernel, program, probes
        self._times, self._skip, self._form = times, skip, form
        self._lock = threading.Lock()
        self.compiles, self.messages = 0, ()

    compiles: int
    messages: tuple[str, ...]

    @property
    def failures(self) -> int:
        return len(self.messages)

    def __enter__(self) -> inject_oom:
        self.compiles, self.messages = 0, ()
        self._was_guarded = hook.seams_active()
        hook.add_interceptor(self._intercept)
        return self

    def __exit__(self, *error: Any) -> None:
        hook.remove_interceptor(self._intercept, uninstall_too=not self._was_guarded)

    def _recreate_cm(self) -> inject_oom:
        return inject_oom(kernel=self._kernel, times=self._times, skip=self._skip, form=self._form,
                          program=self._program, probes=self._probes)

    def _intercept(self, program: _jax.Program, module: Any, options: dict[str, Any], alone: bool) -> None:
        if alone and not self._probes:
            return
        victim = self._victim(program, module, options)
        if victim is None:
            return
        with self._lock:
            self.compiles += 1
            if self.compiles <= self._skip or (self._times is not None and self.failures >= self._times):
                return
            text = message(self._form, victim)
            self.messages += (text,)
        raise jax.errors.JaxRuntimeError(text)

    def _victim(self, program: _jax.Program, module: Any, options: dict[str, Any]) -> Victim | None:
        names = (program.name, _function_name(program.name))
        if self._program is not None and not any(fnmatch.fnmatchcase(name, self._program) for name in names):
            return None
        chip = chip_for_device_kind(program.device_kind) or chip_named(_ELSEWHERE)
        flag = planner.flag_bytes(options, os.environ.get("LIBTPU_INIT_ARGS", ""))
        for victim in _victims(program, module, chip, flag):
            if self._kernel is None or fnmatch.fnmatchcase(victim.instruction, self._kernel):
                return victim
        if self._kernel is None and self._program is not None:
            return Victim(program=program.name, instruction="fusion", is_kernel=False, chip=chip,
                          limit_bytes=flag or chip.default_limit_bytes)
        return None


def _function_name(program: str) -> str:
    """"f", for the program that JAX calls "jit(f)"."""
    return program.partition("(")[2].removesuffix(")") or program


def _victims(program: _jax.Program, module: Any, chip: Chip, flag: int | None) -> Iterator[Victim]:
    """The kernels of a program that is about to be compiled: for a TPU its custom calls, elsewhere what was traced."""
    calls = custom_calls(module)
    if calls:
        for kernel, call in zip(read_kernels(module), calls, strict=True):
            yield Victim(program=program.name, instruction=kernel.name, is_kernel=True, chip=chip,
                         limit_bytes=planner.limit_in_force(kernel, chip=chip, flag_bytes=flag),
                         metadata=metadata_text(call))
    elif program.lowering is not None and program.lowering.closed_jaxpr is not None:
        for name in _jax.kernel_names(program.lowering.closed_jaxpr):
            yield Victim(program=program.name, instruction=name, is_kernel=True, chip=chip,
                         limit_bytes=chip.default_limit_bytes)


class RepairsForbidden(AssertionError):
    """Programs had to be repaired where `forbid_repairs()` says that none may."""

    def __init__(self, made: tuple[Repair, ...]):
        super().__init__("these programs compiled only because the guard changed them:\n" + "\n".join(map(str, made)))
        self.repairs = made


class forbid_repairs(contextlib.ContextDecorator):
    """Raises at its end if the guard repaired a program meanwhile, in any thread, from a plan file or anew.

    Use it as a context manager or as a decorator of a test. An exception from inside is left as it is.

    Raises:
      RepairsForbidden: an AssertionError that lists the repairs with the source edits that make them permanent.
    """

    def __enter__(self) -> None:
        self._before = {id(repair): repair for repair in repairs()}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        made = tuple(repair for repair in repairs() if id(repair) not in self._before)
        if made and error is None:
            raise RepairsForbidden(made)

    def _recreate_cm(self) -> forbid_repairs:
        return forbid_repairs()
