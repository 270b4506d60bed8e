"""One program's side of an agreement between processes: changes in, agreed changes out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from jax_vmem_guard import _jax, agreement
from jax_vmem_guard._version import __version__
from jax_vmem_guard.changes import Change
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.recall import Memory

#: Fields of a change that may differ between hosts: checkouts lie in different places.
_ONLY_WORDS = ("source", "edit", "before", "after")
#: Fields of a policy that say how a host works, not what it decides.
_LOCAL_POLICY = ("plan_file", "bug_report_dir", "agreement_timeout_s")


class Consensus:
    """Agrees with the other processes of a program, one changed form of it after the other. Free where there are none.

    Args:
      program: the program.
      policy: this process's policy.
      memory: knows the program's digest and environment; None for a chip nothing is known of, which nobody changes.
    """

    def __init__(self, program: _jax.Program, policy: Policy, memory: Memory | None):
        self._program, self._policy, self._memory = program, policy, memory
        self._processes = program.processes if memory is not None else ()
        self._attempt = 0

    @property
    def alone(self) -> bool:
        return len(self._processes) <= 1

    def settle(self, changes: Iterable[Change], *, remembered: bool) -> tuple[Change, ...]:
        """The changes that every process makes in the next compile of the program.

        Args:
          changes: what this process would do.
          remembered: some of it comes from a plan file, so that a process without one would do something else.

        Returns:
          The lowest process's changes: `changes` themselves unless something is remembered.

        Raises:
          AgreementError: see `agreement.agree`.
        """
        changes = tuple(changes)
        if self.alone:
            return changes
        mine = json.dumps([dataclasses.asdict(change) for change in changes], sort_keys=True)
        agreed = agreement.agree(
            self._key, mine, timeout_s=self._policy.agreement_timeout_s, processes=self._processes, facts=self._facts,
            attempt=self._attempt, remembered=remembered, only_words=_ONLY_WORDS)
        self._attempt += 1
        return tuple(Change(**change) for change in json.loads(agreed))

    def decline(self, reason: str) -> None:
        """Tells the others that this process gives up, so that they do not wait for it."""
        if not self.alone:
            agreement.decline(self._key, reason, processes=self._processes, facts=self._facts, attempt=self._attempt)

    @property
    def _key(self) -> str:
        assert self._memory is not None
        return f"{self._program.name}@{self._memory.digest}"

    @property
    def _facts(self) -> dict[str, Any]:
        assert self._memory is not None
        policy = {name: value for name, value in dataclasses.asdict(self._policy).items() if name not in _LOCAL_POLICY}
        return {"jax_vmem_guard": __version__, "policy": policy, "environment": dataclasses.asdict(self._memory.environment)}
