"""The compile loop: compile, understand the failure, plan, change a copy of the program, compile again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_vmem_guard import _jax, ahead
from jax_vmem_guard.agreement import AgreementError
from jax_vmem_guard.bug_report import write_bundle
from jax_vmem_guard.chips import chip_for_device_kind
from jax_vmem_guard.choosing import attempt_recalled, attempt_refused, attempt_repair, has_choices
from jax_vmem_guard.consensus import Consensus
from jax_vmem_guard.diagnosis import Diagnosis, diagnose
from jax_vmem_guard.explain import explain
from jax_vmem_guard.journal import journal
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.recall import Memory, Recollection
from jax_vmem_guard.refused import refused_by_compiler
from jax_vmem_guard.repair import Attempt, start_probes

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
      AgreementError: several processes run the program and do not agree on how to change it.
    """
    if policy is not None:
        if policy.mode == "off":
            return program.compile()
        if program.repaired is not None and program.repaired[0] == policy:
            return program.repaired[1]
    counsel = _Counsel(program, policy) if policy is not None else None
    attempt = counsel.act_ahead() if counsel is not None else None
    if counsel is not None and attempt is not None and attempt.executable is not None:
        return counsel.finish(attempt)
    speculation = counsel.speculate() if counsel is not None else None
    try:
        return program.compile()
    except Exception as error:
        diagnosis = diagnose(error)
        program.was_refused = diagnosis is not None
        policy = policy if policy is not None else policy_inside()
        if policy is None or policy.mode == "off" or (diagnosis is None and not refused_by_compiler(error)):
            raise
        counsel = counsel if counsel is not None else _Counsel(program, policy)
        if diagnosis is None:
            attempt = counsel.take_references()
            if attempt.executable is None:
                raise
            return counsel.finish(attempt)
        if speculation is not None:
            attempt = speculation.result()
        if attempt is None:
            attempt = counsel.repair(diagnosis)
        if attempt.executable is None:
            counsel.give_up(attempt)
            # Nothing that goes wrong with a note may take the place of the compiler's error.
            with contextlib.suppress(Exception):
                error.add_note(_note(program, diagnosis, attempt))
                if diagnosis.is_kernel is False:
                    error.add_note(_bug_report(program, policy, error, diagnosis))
            raise
    finally:
        if speculation is not None:
            speculation.abandon()
    return counsel.finish(attempt)


class _Counsel:
    """Everything that is asked about one program on its way: what is remembered, and what other processes say."""

    def __init__(self, program: _jax.Program, policy: Policy):
        self._program, self._policy = program, policy
        self._chip = chip_for_device_kind(program.device_kind)
        self._memory = Memory.of(program, policy, self._chip) if self._chip is not None else None
        self._consensus = Consensus(program, policy, self._memory)
        self._recollection = self._safely(self._recollect, Recollection())
        self._wasted = 0  # compiles of what was remembered, in vain
        self._outlook = "open"

    def act_ahead(self) -> Attempt | None:
        """Compile a changed program first, where it is known or certain that the program itself fails.

        Returns:
          The attempt; None where the compiler should speak first.
        """
        if self._policy.mode != "fix" or self._chip is None:
            return None
        if self._recollection.is_certain:
            attempt = attempt_recalled(self._program, self._policy, self._chip, self._consensus, self._recollection)
            if attempt.executable is not None:
                return attempt
            logger.warning("`%s`: %s. It is looked at again.", self._program.name, "; ".join(attempt.tried))
            self._recollection, self._wasted = Recollection(), 1
        if self._recollection.failure is None:
            self._outlook = self._safely(lambda: ahead.outlook(self._program, self._policy), "open")
        return self.repair(None) if self._outlook == "certain" else None

    def speculate(self) -> _Speculation | None:
        """Where failure is likely, let other threads work on the repair while the program is compiled unchanged.

        By default they only measure the kernels in question, so that a failure costs no time beyond the compile that
        failed; with `Policy.speculate` they compile the repaired program too. What they find counts only after a failure.
        """
        if self._outlook != "likely" or self._chip is None:
            return None
        chip = self._chip
        program = self._program.detached()
        if self._policy.speculate:
            return _Speculation(lambda: self._repair(program, None))
        self._safely(lambda: start_probes(program, self._policy, chip), None)
        return None

    def repair(self, diagnosis: Diagnosis | None) -> Attempt:
        """Find a change. A fault of the guard's own must not hide the compiler's error."""
        return self._repair(self._program, diagnosis)

    def _repair(self, program: _jax.Program, diagnosis: Diagnosis | None) -> Attempt:
        if self._recollection.failure is not None and self._policy.mode == "fix" and not has_choices(program):
            return Attempt(tried=(f"nothing: the plan file remembers that nothing helps: {self._recollection.failure}. "
                                  "`jax-vmem-guard plan prune --failed FILE` lets the guard try again",))
        try:
            attempt = attempt_repair(program, self._policy, diagnosis, self._consensus, self._recollection)
        except AgreementError:
            raise
        except Exception as fault:
            logger.exception("jax_vmem_guard failed while it repaired `%s`; the compiler's own error follows",
                             self._program.name)
            return Attempt(tried=(f"the guard itself failed: {type(fault).__name__}: {fault}",))
        return attempt.with_compiles(self._wasted)

    def take_references(self) -> Attempt:
        """Find a reference that its author declared for kernels the compiler refuses."""
        refused: Attempt = self._safely(lambda: attempt_refused(self._program, self._policy, self._consensus), Attempt())
        return refused

    def give_up(self, attempt: Attempt) -> None:
        """Remember that nothing helped, and tell the other processes."""
        why = attempt.tried[-1] if attempt.tried else "it found no change that helps"
        self._consensus.decline("its policy has mode `report`" if self._policy.mode == "report" else why)
        memory = self._memory
        if memory is not None and attempt.stuck:
            self._safely(lambda: memory.failed(attempt.stuck), None)

    def finish(self, attempt: Attempt) -> Any:
        repair, memory = attempt.repair, self._memory
        assert repair is not None
        self._program.was_refused = True
        self._safely(lambda: journal.record(repair), None)
        self._program.remember_repaired(self._policy, attempt.executable)
        if memory is not None and not repair.remembered:
            self._safely(lambda: memory.repaired(repair.changes, attempt.used_bytes), None)
        return attempt.executable

    def _recollect(self) -> Recollection:
        if self._memory is None or self._policy.mode != "fix":
            return Recollection()
        return self._memory.recollect()

    def _safely(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """An answer, or `otherwise` where the guard itself is at fault: then the compiler decides."""
        try:
            return question()
        except Exception:
            logger.exception("jax_vmem_guard failed while it looked at `%s`; the compiler decides", self._program.name)
            return otherwise


class _Speculation:
    """The repaired form of a program, compiled while the program itself is. It counts only if the program fails."""

    def __init__(self, repair: Callable[[], Attempt]):
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jax_vmem_guard")
        self._attempt = self._threads.submit(repair)

    def result(self) -> Attempt:
        # The failing compile of the program itself counts too.
        return self._attempt.result().with_compiles(1)

    def abandon(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _bug_report(program: _jax.Program, policy: Policy, error: Exception, diagnosis: Diagnosis) -> str:
    """Write the bundle for an XLA issue where the policy has a folder for it; returns the note that says so."""
    chip = chip_for_device_kind(program.device_kind)
    if policy.bug_report_dir is None or chip is None:
        return ("No kernel caused this, so it may be a bug of the compiler. For a folder to attach to an issue at "
                "https://github.com/openxla/xla/issues, set JAX_VMEM_GUARD_BUG_REPORT_DIR or Policy.bug_report_dir.")
    folder = write_bundle(Path(policy.bug_report_dir), module_bytecode=_jax.stablehlo_bytecode(program.module), error=error,
                          diagnosis=diagnosis, topology=chip.topology, num_devices=len(program.devices),
                          compiler_options=program.compiler_options)
    return f"A folder to attach to an XLA issue: {folder}" if folder else "No bug report could be written; see the log."


def _note(program: _jax.Program, diagnosis: Diagnosis, attempt: Attempt) -> str:
    chip = chip_for_device_kind(program.device_kind)
    lines = ["jax_vmem_guard:", explain(diagnosis, chip)]
    if attempt.tried:
        lines += ["What the guard tried:", *(f"  - {line}" for line in attempt.tried)]
    return "\n".join(lines)
