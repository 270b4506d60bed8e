"""Repairs one program: learns what its kernels need, plans, compiles the changed program, and escalates if it must."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax_vmem_guard import _jax, planner
from jax_vmem_guard.build import Builder
from jax_vmem_guard.changes import DECLARED, Change
from jax_vmem_guard.chips import Chip, MiB, chip_for_device_kind
from jax_vmem_guard.consensus import Consensus
from jax_vmem_guard.diagnosis import Diagnosis, diagnose
from jax_vmem_guard.estimate import estimated_need
from jax_vmem_guard.footprint import footprint
from jax_vmem_guard.journal import Repair
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.planner import Decision, Need, Probe, Step, Stuck, Variant
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.probe import cannot_probe, prober
from jax_vmem_guard.recall import Recollection
from jax_vmem_guard.remedies import compile_limit, limit
from jax_vmem_guard.suspects import named_by
from jax_vmem_guard.used_vmem import InstructionVmem, used_scoped_vmem


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What came of trying to repair a program: an executable and its repair, or neither and the reasons.

    Attributes:
      executable: the compiled program, or None.
      repair: what was changed, or None.
      tried: what was tried in vain, in words.
      used_bytes: fingerprint -> scoped VMEM a changed kernel used, where a plan file wants to know.
      stuck: fingerprint -> why no remedy makes this kernel fit; only for kernels where that is sure.
      suspects: fingerprints of the kernels that are in the way, where there is no executable.
      needs: fingerprint -> scoped VMEM in bytes that a kernel of the program needs as it is, where that was asked.
      compiles, probes: how many it took, where there is no repair that says so.
    """

    executable: Any = None
    repair: Repair | None = None
    tried: tuple[str, ...] = ()
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    stuck: Mapping[str, str] = field(default_factory=dict)
    suspects: frozenset[str] = frozenset()
    needs: Mapping[str, int] = field(default_factory=dict)
    compiles: int = 0
    probes: int = 0

    def with_compiles(self, more: int) -> Attempt:
        """The attempt, with further compiles of the program counted in."""
        if self.repair is None:
            return self
        return replace(self, repair=replace(self.repair, compiles=self.repair.compiles + more))


def attempt_repair(program: _jax.Program, policy: Policy, diagnosis: Diagnosis | None, consensus: Consensus,
                   recollection: Recollection) -> Attempt:
    """Find the least change that makes a program compile.

    Args:
      program: the program; it is not compiled unchanged here.
      policy: what is allowed.
      diagnosis: how its unchanged compile failed; None where the guard acts before that compile.
      consensus: settles each change with the other processes that run the program.
      recollection: what is remembered of its kernels.

    Raises:
      AgreementError: the processes do not agree.
    """
    chip = chip_for_device_kind(program.device_kind)
    if chip is None:
        return Attempt(tried=(f"nothing: `{program.device_kind}` is not a chip this version knows",))
    session = _Session(program, policy, chip, consensus, recollection.hints)
    if policy.mode == "report":
        return session.foresee(diagnosis)
    return session.run(diagnosis)


def attempt_cheaply(program: _jax.Program, policy: Policy, chip: Chip, diagnosis: Diagnosis | None,
                    consensus: Consensus, recollection: Recollection) -> Attempt:
    """`attempt_repair` with only what costs the running program less than another declared choice does: limits,
    memory coloring, and single buffers where a window never changes. A kernel whose windows and scratch alone exceed
    the chip is not probed.

    Raises:
      AgreementError: the processes do not agree.
    """
    remedies = tuple(remedy for remedy in policy.remedies if remedy != "split")
    session = _Session(program, replace(policy, remedies=remedies), chip, consensus, recollection.hints)
    session.spare_the_hopeless()
    return session.run(diagnosis)


def attempt_another(program: _jax.Program, policy: Policy, chip: Chip, consensus: Consensus, recollection: Recollection,
                    *, cheaply: bool) -> Attempt:
    """Compile a program that takes the place of one that failed, with the changes it needs, or as it is if none.

    Args:
      cheaply: only with what `attempt_cheaply` may do.

    Raises:
      AgreementError: the processes do not agree.
    """
    if cheaply:
        policy = replace(policy, remedies=tuple(remedy for remedy in policy.remedies if remedy != "split"))
    session = _Session(program, policy, chip, consensus, recollection.hints)
    if cheaply:
        session.spare_the_hopeless()
    return session.run_another()


def attempt_recalled(program: _jax.Program, policy: Policy, chip: Chip, consensus: Consensus,
                     recollection: Recollection) -> Attempt:
    """Compile a program with the changes that made it compile before.

    Raises:
      AgreementError: the processes do not agree.
    """
    return _Session(program, policy, chip, consensus, {}).run_recalled(recollection)


def start_probes(program: _jax.Program, policy: Policy, chip: Chip) -> None:
    """Begin to measure the kernels that may not fit, in other threads; a repair that follows finds the answers.

    Args:
      program: a detached program: nobody else may use its module meanwhile.
      policy: what is allowed.
      chip: what the program is compiled for.
    """
    _Session(program, policy, chip, Consensus(program, policy, None), {}).start_probes()


class _Session:
    """The state of one repair. Everything it decides follows from the program, the chip, the policy and the compiler."""

    def __init__(self, program: _jax.Program, policy: Policy, chip: Chip, consensus: Consensus,
                 hints: Mapping[str, tuple[Change, ...]]):
        self.program, self.policy, self.chip = program, policy, chip
        self.consensus = consensus
        # A hint that another declared choice helped says nothing about changes of this program's kernels.
        self.hints = {f: changes for f, changes in hints.items() if not any(c.remedy in DECLARED for c in changes)}
        self.builder = Builder(program, chip, policy)
        flag = planner.flag_bytes(program.compiler_options, os.environ.get("LIBTPU_INIT_ARGS", ""))
        self.kernels = {k.fingerprint: k for k in self.builder.kernels if k.core == "tc"}
        self.limits = {f: planner.limit_in_force(k, chip=chip, flag_bytes=flag) for f, k in self.kernels.items()}
        self.needs: dict[str, dict[Variant, Need]] = {f: {} for f in self.kernels}
        self.refused: dict[str, frozenset[Variant]] = {f: frozenset() for f in self.kernels}
        self.plan: dict[str, tuple[Change, ...]] = {}
        self.at_capacity: set[str] = set()
        self.options_change: Change | None = None
        self.flag_bytes = flag if flag is not None else chip.default_limit_bytes
        self.compiles, self.probes = 0, 0
        self.tried: list[str] = []
        self.stuck: dict[str, str] = {}
        self.estimated: set[str] = set()  # kernels whose need was not probed
        self.probe_all = False
        self.remembered = False  # something of the plan comes from a plan file
        self.first_diagnosis: Diagnosis | None = None
        self.suspects: frozenset[str] = frozenset()
        self.proposals = self.builder.proposals

    # -- planning ------------------------------------------------------------------------------------------------------

    def run(self, diagnosis: Diagnosis | None) -> Attempt:
        self.compiles = 0 if diagnosis is None else 1
        if diagnosis is not None and diagnosis.form == "pinned":
            return Attempt(tried=(f"nothing: the program itself pins these to VMEM: {self._pinned()}",))
        self.first_diagnosis = diagnosis
        possible = self._first_plan()
        if possible and not self.plan and self.options_change is None:
            return self._failure("nothing: every kernel fits when it is compiled alone")
        return self._compile_until_it_works(possible)

    def run_another(self) -> Attempt:
        """The same for a program that nobody compiled yet and that may need no change at all."""
        return self._compile_until_it_works(self._first_plan())

    def spare_the_hopeless(self) -> None:
        """Ask no compiler about kernels whose windows and scratch alone exceed the chip, and propose nothing that costs
        the running program much."""
        for fingerprint, kernel in self.kernels.items():
            known = footprint(kernel, self.chip).expected_bytes if kernel.readable else 0
            if known > self.chip.capacity_bytes:
                self.needs[fingerprint][()] = Need(bytes=known, fits=False)
        self.proposals = lambda *of: tuple(c for c in self.builder.proposals(*of) if not c.data.get("last_resort"))

    def _compile_until_it_works(self, possible: bool) -> Attempt:
        while possible and self.compiles < self.policy.max_compiles:
            self._settle()
            self.compiles += 1
            try:
                executable = self._compile(self.plan, self.options_change)
            except Exception as error:
                possible = self._learn_from(error)
            else:
                return self._tighten(executable)
        if possible:
            self.tried.append(f"gave up after {self.compiles} compiles of the program (`Policy.max_compiles`)")
        return self._failure()

    def _failure(self, *words: str) -> Attempt:
        return Attempt(tried=(*self.tried, *words), stuck=self.stuck, suspects=frozenset(self.stuck) or self.suspects,
                       needs=self._plain_needs(), compiles=self.compiles, probes=self.probes)

    def _plain_needs(self) -> dict[str, int]:
        plain = {fingerprint: needs[()].bytes for fingerprint, needs in self.needs.items() if () in needs}
        return {fingerprint: size for fingerprint, size in plain.items() if size is not None}

    def run_recalled(self, recollection: Recollection) -> Attempt:
        """Compile the program, for the first time, with what is remembered of it."""
        self.plan = dict(recollection.certain)
        self.options_change = recollection.compile_change
        self.remembered = True
        self._settle()
        self.compiles = 1
        try:
            return self._success(self._compile(self.plan, self.options_change), remembered=True)
        except Exception as error:
            return Attempt(tried=(f"what the plan file remembers, {self._plan_in_words()}: {_first_line(error)}",))

    def start_probes(self) -> None:
        doubtful = [f for f, kernel in self.kernels.items() if cannot_probe(kernel) is None
                    and estimated_need(kernel, self.chip, self.limits[f]) is None]
        prober.start(self.program, {(f, ()): self.builder.alone(f, ()) for f in doubtful})

    def foresee(self, diagnosis: Diagnosis | None) -> Attempt:
        """What would be tried first, in words, without compiling the program."""
        self.first_diagnosis = diagnosis
        if diagnosis is not None and diagnosis.form == "pinned":
            return Attempt(tried=(f"nothing: the program itself pins these to VMEM: {self._pinned()}",))
        possible = self._first_plan()
        words = [f"{c.kernel}: {c.before} -> {c.after}" + (f", needs {c.need_bytes / MiB:.2f} MiB" if c.need_bytes else "")
                 + f"; to do it yourself: {c.edit}" for c in self._changes()] if possible else []
        return Attempt(tried=("nothing: mode `report` only explains" + ("; mode `fix` would try:" if words else ""), *words,
                              *self.tried))

    def _first_plan(self) -> bool:
        """The first plan after the unchanged program failed, or before it is compiled; False if there is none."""
        diagnosis = self.first_diagnosis
        possible = self._plan_kernels() if diagnosis is None or diagnosis.is_kernel is not False else True
        if possible and not self.plan and diagnosis is not None:
            return self._escalate(diagnosis)
        return possible

    def _settle(self) -> None:
        """Take over what the processes of the program agree on."""
        if self.consensus.alone:
            return
        mine = self._changes()
        agreed = self.consensus.settle(mine, remembered=self.remembered)
        if agreed == mine:
            return
        self.remembered = True  # only then the plan of the lowest process may be another one
        self.plan = {f: tuple(c for c in agreed if c.fingerprint == f) for f in self.kernels}
        self.plan = {f: changes for f, changes in self.plan.items() if changes}
        self.options_change = next((c for c in agreed if c.remedy == compile_limit.NAME), None)
        self.at_capacity = set()

    def _plan_kernels(self) -> bool:
        """Plan for every kernel that can be probed, and raise those that cannot but look too large."""
        for fingerprint, changes in self.hints.items():
            self.plan[fingerprint] = changes
            self.remembered = True
        steps = self._decide({f: k for f, k in self.kernels.items() if cannot_probe(k) is None and f not in self.hints})
        for fingerprint, step in steps.items():
            if isinstance(step, Stuck):
                self._note_stuck(fingerprint, step)
            elif isinstance(step, Decision) and step.changes:
                self.plan[fingerprint] = step.changes
        for fingerprint, kernel in self.kernels.items():
            if fingerprint not in self.hints and self._unknown(fingerprint) and self._looks_too_large(kernel):
                self._raise_to_capacity(fingerprint)
        stuck = {f for f, step in steps.items() if isinstance(step, Stuck) and not self._unknown(f)}
        return not stuck or not self._hopeless(stuck)

    def _hopeless(self, stuck: set[str]) -> bool:
        """Whether kernels that nothing makes fit alone are what the program fails for.

        Inside the program XLA may place their operands in VMEM, and then they fit as they are: it is another kernel that
        failed, and the plan has a change for it.
        """
        if not self.plan:
            return True
        if self.first_diagnosis is None:
            return False
        blamed = named_by(self.first_diagnosis, self.builder)
        return bool(stuck & blamed) if blamed else self.first_diagnosis.form != "limit"

    def _unknown(self, fingerprint: str) -> bool:
        """Whether nothing is known of the kernel's need: it cannot be probed, or the probe failed for another reason."""
        plain = self.needs[fingerprint].get(())
        return plain is None or (not plain.fits and plain.bytes is None)

    def _looks_too_large(self, kernel: Kernel) -> bool:
        return kernel.readable and footprint(kernel, self.chip).at_most_bytes > self.limits[kernel.fingerprint]

    def _decide(self, kernels: Mapping[str, Kernel]) -> dict[str, Step]:
        """Ask the planner about each kernel and the compiler about each variant it wants to know."""
        steps: dict[str, Step] = {}
        while len(steps) < len(kernels):
            wanted: dict[str, Variant] = {}
            for fingerprint, kernel in kernels.items():
                if fingerprint in steps:
                    continue
                step = planner.decide(
                    kernel, limit_bytes=self.limits[fingerprint], needs=self.needs[fingerprint],
                    refused=self.refused[fingerprint], chip=self.chip, policy=self.policy,
                    proposals=self.proposals)
                if isinstance(step, Probe) and step.variant == () and self._estimate(kernel):
                    continue
                if isinstance(step, Probe):
                    wanted[fingerprint] = step.variant
                else:
                    steps[fingerprint] = step
            self._probe(wanted)
        return steps

    def _estimate(self, kernel: Kernel) -> bool:
        """Take the kernel's own code for an answer, where it is good enough and no estimate has failed yet."""
        if self.probe_all:
            return False
        need = estimated_need(kernel, self.chip, self.limits[kernel.fingerprint])
        if need is None:
            return False
        self.needs[kernel.fingerprint][()] = need
        self.estimated.add(kernel.fingerprint)
        return True

    def _plan_without_estimates(self) -> bool:
        """The program failed although every estimate said it fits: ask the compiler about each kernel."""
        self.probe_all = True
        for fingerprint in self.estimated:
            self.needs[fingerprint].clear()
            self.plan.pop(fingerprint, None)
        self.estimated.clear()
        return self._plan_kernels()

    def _probe(self, wanted: Mapping[str, Variant]) -> None:
        modules = {}
        for fingerprint, variant in wanted.items():
            try:
                modules[fingerprint, variant] = self.builder.alone(fingerprint, variant)
            except Exception as error:
                self.needs[fingerprint][variant] = Need(bytes=None, fits=False, problem=str(error))
        needs, compiles = prober.needs(self.program, modules)
        self.probes += compiles
        for (fingerprint, variant), need in needs.items():
            self.needs[fingerprint][variant] = need

    # -- compiling the program -----------------------------------------------------------------------------------------

    def _compile(self, plan: Mapping[str, tuple[Change, ...]], options_change: Change | None) -> Any:
        module = self.builder.changed(plan)
        options = compile_limit.options(options_change) if options_change is not None else None
        return self.program.compile_changed(module, options)

    def _learn_from(self, error: Exception) -> bool:
        """After a failure of the changed program: is there something else to try?"""
        diagnosis = diagnose(error)
        self.tried.append(f"{self._plan_in_words()}: {_first_line(error)}")
        if self.remembered:
            return self._forget()
        if diagnosis is None:
            return self._take_back(tuple(self.plan))
        return self._escalate(diagnosis)

    def _forget(self) -> bool:
        """What was remembered does not help here: plan as if nothing had been."""
        self.hints, self.remembered = {}, False
        self.plan, self.options_change, self.at_capacity = {}, None, set()
        return self._first_plan()

    def _escalate(self, diagnosis: Diagnosis) -> bool:
        """Allow more where the failure is: a limit at capacity first, other variants after that."""
        if diagnosis.is_kernel is False and diagnosis.form == "limit":
            return self._raise_flag(diagnosis)
        if self.estimated and self._plan_without_estimates() and self.plan:
            return True
        suspects = named_by(diagnosis, self.builder) & set(self.kernels) or {
            f for f in self.kernels if self._unknown(f)} or set(self.plan) or set(self.kernels)
        self.suspects = frozenset(suspects)
        raisable = sorted(f for f in suspects if f not in self.at_capacity
                          and self.limits[f] < self.chip.capacity_bytes)
        if diagnosis.form == "limit" and raisable and "limit" in self.policy.remedies:
            for fingerprint in raisable:
                self._raise_to_capacity(fingerprint)
            return True
        return self._take_back(sorted(suspects & set(self.plan)))

    def _raise_to_capacity(self, fingerprint: str) -> None:
        if "limit" not in self.policy.remedies:
            return
        kernel = self.kernels[fingerprint]
        others = tuple(c for c in self.plan.get(fingerprint, ()) if c.remedy != limit.NAME)
        self.plan[fingerprint] = (*others, limit.set_to(kernel, planner.ceiling(others, self.chip), need_bytes=None,
                                                        limit_bytes=self.limits[fingerprint]))
        self.at_capacity.add(fingerprint)

    def _raise_flag(self, diagnosis: Diagnosis) -> bool:
        if compile_limit.NAME not in self.policy.remedies:
            self.tried.append(f"nothing: `{compile_limit.NAME}` is not among the allowed remedies")
            return False
        change = compile_limit.next_change(
            diagnosis, previous=self.options_change, flag_bytes=self.flag_bytes, chip=self.chip)
        if change is None:
            return False
        self.options_change = change
        return True

    def _take_back(self, fingerprints: tuple[str, ...] | list[str]) -> bool:
        """These variants did not survive the compile of the whole program: plan others."""
        changed = {f: tuple(c for c in self.plan[f] if c.remedy != limit.NAME) for f in fingerprints if f in self.plan}
        if not changed:
            return False
        for fingerprint, variant in changed.items():
            self.refused[fingerprint] |= {_without_need(variant)}
            self.at_capacity.discard(fingerprint)
            del self.plan[fingerprint]
        steps = self._decide({f: self.kernels[f] for f in changed if not self._unknown(f)})
        for fingerprint, step in steps.items():
            if isinstance(step, Decision):
                self.plan[fingerprint] = step.changes
            elif isinstance(step, Stuck):
                self._note_stuck(fingerprint, step)
        return all(isinstance(step, Decision) for step in steps.values()) and len(steps) == len(changed)

    # -- after success -------------------------------------------------------------------------------------------------

    def _tighten(self, executable: Any) -> Attempt:
        """Lower limits that were raised to the chip to what the compiler then reported, and prove that by a compile."""
        try:
            used = used_scoped_vmem(executable)
        except ValueError as error:  # it compiled: that it does not show what it used is no reason to fail
            self.tried.append(f"limits at what was used: {_first_line(error)}")
            return self._success(executable)
        plan = {f: self._tightened(f, changes, used) for f, changes in self.plan.items()}
        plan = {f: changes for f, changes in plan.items() if changes}
        flag_change = compile_limit.tightened(self.options_change, used, self.chip) if self.options_change else None
        if (plan, flag_change) != (self.plan, self.options_change) and self.compiles < self.policy.max_compiles:
            loose = self.plan, self.options_change
            self.plan, self.options_change = plan, flag_change
            self._settle()
            self.compiles += 1
            try:
                executable = self._compile(self.plan, self.options_change)
            except Exception as error:
                self.tried.append(f"limits at what was used: {_first_line(error)}")
                self.plan, self.options_change = loose
        return self._success(executable)

    def _tightened(self, fingerprint: str, changes: tuple[Change, ...],
                   used: tuple[InstructionVmem, ...]) -> tuple[Change, ...]:
        if fingerprint not in self.at_capacity:
            return changes
        most = max((row.used_bytes or 0 for row in used if self.builder.labelled(row.label) == fingerprint), default=0)
        if not most:
            return changes
        others = tuple(c for c in changes if c.remedy != limit.NAME)
        if most <= self.limits[fingerprint]:
            return others
        return (*others, limit.raise_to(self.kernels[fingerprint], need_bytes=most, limit_bytes=self.limits[fingerprint],
                                        ceiling=planner.ceiling(others, self.chip)))

    def _success(self, executable: Any, *, remembered: bool = False) -> Attempt:
        changes = self._changes()
        repair = Repair(program=self.program.name, chip=self.chip.name, compiles=self.compiles, probes=self.probes,
                        changes=changes, remembered=remembered)
        # Only a plan file asks for what was used: the text of a large program takes long to print.
        wanted = self.policy.plan_file is not None and not remembered
        used = self._used_by({c.fingerprint for c in changes}, executable) if wanted else {}
        return Attempt(executable=executable, repair=repair, tried=tuple(self.tried), used_bytes=used,
                       needs=self._plain_needs())

    def _used_by(self, fingerprints: Iterable[str], executable: Any) -> dict[str, int]:
        try:
            rows = used_scoped_vmem(executable)
        except ValueError:
            return {}
        found = {f: [row.used_bytes for row in rows if self.builder.labelled(row.label) == f] for f in fingerprints}
        return {fingerprint: max(used) for fingerprint, used in found.items() if used}

    def _changes(self) -> tuple[Change, ...]:
        """All changes of the plan, in the order of the kernels."""
        changes = tuple(change for f in self.kernels for change in self.plan.get(f, ()))
        return changes if self.options_change is None else (*changes, self.options_change)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _note_missing_trace(self) -> None:
        if "split" in self.policy.remedies and self.builder.cannot_split:
            self.tried.append("no split: the program was traced before the guard was there, or its trace is gone; "
                              "`jax.clear_caches()` and another compile let the guard see it")

    def _note_stuck(self, fingerprint: str, step: Stuck) -> None:
        self._note_missing_trace()
        kernel = self.kernels[fingerprint]
        need = "" if step.need_bytes is None else f"; the least need seen is {step.need_bytes / MiB:.2f} MiB"
        why = (f"{step.reason}{need}; the limit is {self.limits[fingerprint] / MiB:.2f} MiB, the chip has "
               f"{self.chip.capacity_bytes / MiB:.2f} MiB")
        self.tried.append(why + (f" ({kernel.source})" if kernel.source else ""))
        if not self._unknown(fingerprint):
            self.stuck[fingerprint] = why

    def _pinned(self) -> str:
        """Operands and results the program's author placed in VMEM, with the kernels that take them."""
        found = []
        for kernel in self.builder.kernels:
            for kind, colors in (("operand", kernel.input_colors), ("result", kernel.output_colors)):
                found += [f"{kind} {position} of `{kernel.name}`" + (f" ({kernel.source})" if kernel.source else "")
                          for position in colors]
        return ", ".join(found) or "operands of its kernels (`with_memory_space_constraint`)"

    def _plan_in_words(self) -> str:
        return "; ".join(f"{c.kernel}: {c.after}" for c in self._changes()) or "no change"


def _without_need(variant: Variant) -> Variant:
    """The variant as the planner proposed it, before its need was noted."""
    return tuple(planner.with_need(change, None) for change in variant)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
