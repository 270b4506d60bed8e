"""The compile loop: compile, understand the failure, plan, change a copy of the program, compile again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_vmem_guard import _jax, ahead
from jax_vmem_guard.chips import chip_for_device_kind
from jax_vmem_guard.diagnosis import Diagnosis, diagnose
from jax_vmem_guard.explain import explain
from jax_vmem_guard.journal import journal
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.repair import Attempt, attempt_repair

logger = logging.getLogger("jax_vmem_guard")


def compile_program(program: _jax.Program, policy: Policy | None, policy_inside: Callable[[], Policy | None]) -> Any:
    """Compile a program, repaired if need be.

    Args:
      program: the lowered program.
      policy: the policy for the whole program, or None.
      policy_inside: finds the policy of a marked function the program calls; asked only after a failure.

    Returns:
      What JAX's own compile would have returned.

    Raises:
      Whatever the compiler raised first, the same object, where the guard cannot or may not repair; a VMEM failure
      then carries the diagnosis and the attempts as notes.
    """
    if policy is not None:
        if policy.mode == "off":
            return program.compile()
        if program.repaired is not None and program.repaired[0] == policy:
            return program.repaired[1]
    outlook = _outlook(program, policy)
    attempt = None
    if outlook == "certain":
        attempt = _repair_safely(program, policy, None)
        if attempt.executable is not None:
            return _finish(program, policy, attempt)
    speculation = _Speculation(program, policy) if outlook == "likely" else None
    try:
        return program.compile()
    except Exception as error:
        diagnosis = diagnose(error)
        policy = policy if policy is not None else policy_inside()
        if diagnosis is None or policy is None or policy.mode == "off":
            raise
        if speculation is not None:
            attempt = speculation.result()
        if attempt is None:
            attempt = _repair_safely(program, policy, diagnosis)
        if attempt.executable is None:
            error.add_note(_note(program, diagnosis, attempt))
            raise
    finally:
        if speculation is not None:
            speculation.abandon()
    return _finish(program, policy, attempt)


def _outlook(program: _jax.Program, policy: Policy | None) -> str:
    """What is known before the first compile: "certain" to need a change, "likely" to fail, or "open"."""
    if policy is None or policy.mode != "fix":
        return "open"
    try:
        return ahead.outlook(program, policy)
    except Exception:
        logger.exception("jax_vmem_guard could not read the kernels of `%s`; the compiler decides", program.name)
        return "open"


class _Speculation:
    """The repaired form of a program, compiled while the program itself is. It counts only if the program fails."""

    def __init__(self, program: _jax.Program, policy: Policy | None):
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jax_vmem_guard")
        self._attempt = self._threads.submit(_repair_safely, program, policy, None)

    def result(self) -> Attempt:
        # The failing compile of the program itself counts too.
        return self._attempt.result().with_compiles(1)

    def abandon(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _finish(program: _jax.Program, policy: Policy | None, attempt: Attempt) -> Any:
    assert attempt.repair is not None
    journal.record(attempt.repair)
    program.remember_repaired(policy, attempt.executable)
    return attempt.executable


def _repair_safely(program: _jax.Program, policy: Policy | None, diagnosis: Diagnosis | None) -> Attempt:
    """A fault of the guard's own must not hide the compiler's error."""
    assert policy is not None
    try:
        return attempt_repair(program, policy, diagnosis)
    except Exception as fault:
        logger.exception("jax_vmem_guard failed while it repaired `%s`; the compiler's own error follows", program.name)
        return Attempt(tried=(f"the guard itself failed: {type(fault).__name__}: {fault}",))


def _note(program: _jax.Program, diagnosis: Diagnosis, attempt: Attempt) -> str:
    chip = chip_for_device_kind(program.device_kind)
    lines = ["jax_vmem_guard:", explain(diagnosis, chip)]
    if attempt.tried:
        lines += ["What the guard tried:", *(f"  - {line}" for line in attempt.tried)]
    return "\n".join(lines)
