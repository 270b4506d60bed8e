"""The compile loop: compile, understand the failure, plan, change a copy of the program, compile again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jax_vmem_guard import _jax
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
    if policy is not None and policy.mode == "off":
        return program.compile()
    remembered = program.repaired
    if remembered is not None and policy is not None and remembered[0] == policy:
        return remembered[1]
    try:
        return program.compile()
    except Exception as error:
        diagnosis = diagnose(error)
        policy = policy if policy is not None else policy_inside()
        if diagnosis is None or policy is None or policy.mode == "off":
            raise
        attempt = _repair_safely(program, policy, diagnosis)
        if attempt.executable is None:
            error.add_note(_note(program, diagnosis, attempt))
            raise
    assert attempt.repair is not None
    journal.record(attempt.repair)
    program.remember_repaired(policy, attempt.executable)
    return attempt.executable


def _repair_safely(program: _jax.Program, policy: Policy, diagnosis: Diagnosis) -> Attempt:
    """A fault of the guard's own must not hide the compiler's error."""
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
