"""Repairs a program in which functions have declared choices: when cheap remedies do not do, another choice is taken.

The order, cheapest first: limits, memory coloring and buffers that cost nothing; declared choices, best first; the
costlier remedies (splitting, fewer buffers) on the first choices, then on the last ones; the reference of a fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jax_vmem_guard import _jax, declared, repair
from jax_vmem_guard._jax_trace import CannotTraceAgain
from jax_vmem_guard.changes import DECLARED, Change
from jax_vmem_guard.chips import Chip, chip_for_device_kind
from jax_vmem_guard.choice_order import passed_over
from jax_vmem_guard.choice_records import change_of, references_to_try, say_reference_is_used
from jax_vmem_guard.consensus import Consensus
from jax_vmem_guard.declared import FALLBACK, TUNABLE, Declaration
from jax_vmem_guard.diagnosis import Diagnosis
from jax_vmem_guard.journal import Repair
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.recall import Memory, Recollection
from jax_vmem_guard.repair import Attempt
from jax_vmem_guard.retrace import Retracer

logger = logging.getLogger("jax_vmem_guard")


def attempt_repair(program: _jax.Program, policy: Policy, diagnosis: Diagnosis | None, consensus: Consensus,
                   recollection: Recollection) -> Attempt:
    """`repair.attempt_repair`, with the choices that the program's functions declare."""
    chip = chip_for_device_kind(program.device_kind)
    not_a_kernel = diagnosis is not None and (diagnosis.is_kernel is False or diagnosis.form == "pinned")
    if not declared.any_declared() or chip is None or policy.mode != "fix" or not_a_kernel:
        return repair.attempt_repair(program, policy, diagnosis, consensus, recollection)
    if declared.only_cheap_remedies():
        attempt = repair.attempt_cheaply(program, policy, chip, diagnosis, consensus, recollection)
        return replace(attempt, stuck={})  # that more would not help either is not known
    return _Ladder(program, policy, chip, consensus).climb(diagnosis, recollection)


def attempt_recalled(program: _jax.Program, policy: Policy, chip: Chip, consensus: Consensus,
                     recollection: Recollection) -> Attempt:
    """`repair.attempt_recalled`, where declared choices may be among what is remembered."""
    changes = [change for group in recollection.certain.values() for change in group if change.remedy in DECLARED]
    if not changes:
        return repair.attempt_recalled(program, policy, chip, consensus, recollection)
    return _Ladder(program, policy, chip, consensus).recall(changes)


def attempt_refused(program: _jax.Program, policy: Policy, consensus: Consensus) -> Attempt:
    """Take the references of fallbacks declared with "lowering": the compiler refused a kernel for another reason
    than VMEM."""
    chip = chip_for_device_kind(program.device_kind)
    if not declared.any_declared("lowering") or chip is None or policy.mode != "fix":
        return Attempt()
    return _Ladder(program, policy, chip, consensus).take_references()


def has_choices(program: _jax.Program) -> bool:
    """Whether functions in the program have declared choices: then a failure of other remedies is not the last word."""
    try:
        return declared.any_declared() and bool(Retracer(program.lowering).sites)
    except CannotTraceAgain:
        return False


@dataclass(frozen=True)
class _Form:
    """One form of the program: a choice for every site."""

    program: _jax.Program
    chosen: Mapping[str, int]
    sites: Mapping[str, Declaration]
    kernels: tuple[Kernel, ...]

    @property
    def fingerprints(self) -> frozenset[str]:
        return frozenset(kernel.fingerprint for kernel in self.kernels)

    def index(self, key: str) -> int:
        return self.chosen.get(key, 0)


class _Ladder:
    """The forms of one program, one after the other."""

    def __init__(self, program: _jax.Program, policy: Policy, chip: Chip, consensus: Consensus):
        self._program, self._policy, self._chip, self._consensus = program, policy, chip, consensus
        self._retracer: Retracer | None = None
        self._failed: dict[str, set[int]] = {}  # site -> choices that did not fit
        self._owned: dict[str, tuple[Kernel, ...]] = {}  # site -> kernels that left the program with its choice
        self._compiles = self._probes = 0
        self._tried: list[str] = []

    def climb(self, diagnosis: Diagnosis | None, recollection: Recollection) -> Attempt:
        """Find the least change that makes the program compile, declared choices included."""
        cheap = repair.attempt_cheaply(self._program, self._policy, self._chip, diagnosis, self._consensus, recollection)
        if cheap.executable is not None:
            return cheap
        start = self._start()
        if start is None or not start.sites:
            return self._without_choices(cheap, diagnosis, recollection)
        self._count(cheap)
        form, attempt = self._walk(start, cheap, TUNABLE, cheaply=True)
        if attempt.executable is not None:
            return self._success(start, form, attempt)
        for candidate in (start, form) if form is not start else (start,):
            if self._spent:
                break
            attempt = self._costly(start, candidate, diagnosis, recollection)
            if attempt.executable is not None:
                return self._success(start, candidate, attempt)
        form, attempt = self._walk(form, attempt, FALLBACK, cheaply=False)
        if attempt.executable is not None:
            return self._success(start, form, attempt)
        self._tried.append("no declared choice fits: " + "; ".join(
            f"`{site.name}` ({site.where}): {', '.join(choice.words for choice in site.choices)}"
            for site in dict.fromkeys(start.sites.values())))
        return Attempt(tried=tuple(dict.fromkeys(self._tried)))

    def recall(self, changes: Iterable[Change]) -> Attempt:
        """Compile the form of the program that compiled before."""
        start = self._start()
        agreed = tuple(changes)
        if not self._consensus.alone:
            agreed = self._consensus.settle(agreed, remembered=True)
        for change in agreed:
            key, index = change.data["site"], change.data["choice"]
            site = start.sites.get(key) if start is not None else None
            if site is None or index >= len(site.choices) or site.choices[index].words != change.data["words"]:
                return Attempt(tried=(f"what the plan file remembers, {change.after}: no longer declared for `{key}`",))
        assert start is not None
        chosen = {**start.chosen, **{change.data["site"]: change.data["choice"] for change in agreed}}
        form = self._form(chosen)
        if form is None:
            return Attempt(tried=tuple(self._tried))
        attempt = self._attempt(form, cheaply=False)
        if attempt.executable is None or attempt.repair is None:
            return attempt
        made = replace(attempt.repair, program=self._program.name, changes=(*agreed, *attempt.repair.changes),
                       remembered=True)
        return replace(attempt, repair=made)

    def take_references(self) -> Attempt:
        """Compile the program with references in the place of kernels the compiler refuses, as few as will do."""
        self._compiles = 1
        start = self._start()
        if start is None:
            return Attempt(tried=tuple(self._tried))
        for keys in references_to_try(start.sites, start.chosen):
            form = self._form({**start.chosen, **dict.fromkeys(keys, 1)})
            if form is None or self._spent:
                continue
            gone = tuple(k for k in start.kernels if k.fingerprint not in form.fingerprints)
            self._owned = {key: gone or start.kernels for key in keys}
            form = self._settled(form)
            attempt = self._attempt(form, cheaply=False)
            if attempt.executable is not None:
                return self._success(start, form, attempt)
        return Attempt(tried=tuple(self._tried))

    # -- forms ---------------------------------------------------------------------------------------------------------

    def _start(self) -> _Form | None:
        """The program as it is, with its sites; None where it cannot be traced again."""
        try:
            self._retracer = Retracer(self._program.lowering)
        except CannotTraceAgain as reason:
            self._tried.append(f"no other declared choice: {reason}")
            return None
        return _Form(self._program, self._retracer.chosen, self._retracer.sites, read_kernels(self._program.module))

    def _form(self, chosen: Mapping[str, int]) -> _Form | None:
        """The program with these choices; None, and a note, where it cannot be made."""
        assert self._retracer is not None
        try:
            traced, sites = self._retracer.program(chosen)
            program = self._program.made_again(traced, dict(chosen))
            return _Form(program, dict(chosen), sites, read_kernels(program.module))
        except Exception as error:  # of the user's function, or of JAX where it lowers it: this choice is none
            lines = str(error).strip().splitlines() or [type(error).__name__]
            words = ", ".join(f"`{key}`: {self._retracer.sites[key].describe(index)}" for key, index in chosen.items()
                              if key in self._retracer.sites)
            self._tried.append(f"{words}: {lines[0][:200]}")
            return None

    def _walk(self, form: _Form, attempt: Attempt, kind: str, *, cheaply: bool) -> tuple[_Form, Attempt]:
        """From form to form until one compiles or there is no other; the last form and what came of it."""
        while not self._spent:
            following = self._next(form, attempt.suspects, kind)
            if following is None:
                break
            form = self._settled(following)
            attempt = self._attempt(form, cheaply=cheaply)
            self._count(attempt)
            if attempt.executable is not None:
                break
        return form, attempt

    def _next(self, form: _Form, suspects: frozenset[str], kind: str) -> _Form | None:
        """The form in which the sites that own the suspects have their next choice; None where there is none.

        A site owns the kernels that leave the program when it takes another choice. Where no site alone makes a
        suspect leave (two of them may call the same kernel), all together are tried.
        """
        keys = [key for key, site in form.sites.items() if site.kind == kind and "vmem" in site.reasons]
        reached, left, together = form, suspects & form.fingerprints, form
        for key in keys:
            if not left:
                break
            other = self._advance(reached, key)
            if other is None:
                continue
            gone = left - other.fingerprints
            if gone:
                self._note_step(key, reached, gone)
                reached, left = other, left & other.fingerprints
            else:
                together = self._form({**together.chosen, key: other.index(key)}) or together
        if reached is not form:
            return reached
        gone = left - together.fingerprints
        if gone and together is not form:
            for key in (key for key in keys if together.index(key) != form.index(key)):
                self._note_step(key, form, gone)
            return together
        if left and keys:
            names = ", ".join(sorted({f"`{k.name}`" for k in form.kernels if k.fingerprint in left}))
            self._tried.append(f"no further choice of {', '.join(f'`{key}`' for key in keys)} changes {names}, which is "
                               "what does not fit")
        return None

    def _advance(self, form: _Form, key: str) -> _Form | None:
        """The form with the site's next choice that is worth trying, and that really changes a kernel."""
        site = form.sites[key]
        failed = self._failed.get(key, set()) | {form.index(key)}
        for index in range(form.index(key) + 1, len(site.choices)):
            larger_than = passed_over([choice.keywords for choice in site.choices], index, failed) \
                if site.kind == TUNABLE else None
            if larger_than is not None:
                self._tried.append(f"`{key}`: {site.describe(index)} was passed over: nothing in it is smaller than in "
                                   f"{site.describe(larger_than)}, which did not fit")
                continue
            other = self._form({**form.chosen, key: index})
            if other is None:
                continue
            if other.fingerprints == form.fingerprints:
                words = (f"`{key}`: {site.describe(index)} gives exactly the kernels of {site.describe(form.index(key))}; "
                         f"does `{site.name}` use what the choice sets?")
                logger.warning("%s", words)
                self._tried.append(words)
                continue
            return other
        return None

    def _note_step(self, key: str, form: _Form, gone: frozenset[str]) -> None:
        self._failed.setdefault(key, set()).add(form.index(key))
        self._owned.setdefault(key, tuple(k for k in form.kernels if k.fingerprint in gone))

    # -- attempts ------------------------------------------------------------------------------------------------------

    @property
    def _spent(self) -> bool:
        return self._compiles >= self._policy.max_compiles

    @property
    def _rest_of_policy(self) -> Policy:
        return replace(self._policy, max_compiles=max(1, self._policy.max_compiles - self._compiles))

    def _attempt(self, form: _Form, *, cheaply: bool) -> Attempt:
        """Compile another form. What is remembered of its kernels spares their probes."""
        memory = Memory.of(form.program, self._policy, self._chip)
        return repair.attempt_another(
            form.program, self._rest_of_policy, self._chip, Consensus(form.program, self._policy, memory),
            Recollection(hints=memory.recollect().hints), cheaply=cheaply)

    def _settled(self, form: _Form) -> _Form:
        """The form that all processes of the program go on with: another one where a process remembers a choice."""
        if self._consensus.alone:
            return form
        agreed = self._consensus.settle(self._changes(form, {}), remembered=False)
        chosen = {**form.chosen, **{change.data["site"]: change.data["choice"] for change in agreed}}
        if chosen == dict(form.chosen):
            return form
        return self._form(chosen) or form

    def _costly(self, start: _Form, form: _Form, diagnosis: Diagnosis | None, recollection: Recollection) -> Attempt:
        """Everything the policy allows, on the program as it is or on another form."""
        if form is not start:
            attempt = self._attempt(form, cheaply=False)
            self._count(attempt)
            return attempt
        before = self._compiles
        # The compile that failed first is counted in every attempt at the program itself.
        policy = replace(self._policy, max_compiles=self._rest_of_policy.max_compiles + (diagnosis is not None))
        attempt = repair.attempt_repair(self._program, policy, diagnosis, self._consensus, recollection)
        self._count(attempt)
        self._compiles = max(before, self._compiles - (diagnosis is not None))
        return attempt

    def _without_choices(self, cheap: Attempt, diagnosis: Diagnosis | None, recollection: Recollection) -> Attempt:
        """The program has no sites, or none that can be changed: repair it as any other."""
        compiles = cheap.compiles - (diagnosis is not None)
        policy = replace(self._policy, max_compiles=max(1, self._policy.max_compiles - compiles))
        attempt = repair.attempt_repair(self._program, policy, diagnosis, self._consensus, recollection)
        if attempt.repair is not None:
            made = replace(attempt.repair, compiles=attempt.repair.compiles + compiles,
                           probes=attempt.repair.probes + cheap.probes)
            for words in self._tried:
                logger.info("%s: %s", self._program.name, words)
            return replace(attempt, repair=made)
        return replace(attempt, tried=(*attempt.tried, *self._tried))

    def _count(self, attempt: Attempt) -> None:
        made = attempt.repair
        self._compiles += made.compiles if made is not None else attempt.compiles
        self._probes += made.probes if made is not None else attempt.probes
        self._tried += attempt.tried

    def _success(self, start: _Form, form: _Form, attempt: Attempt) -> Attempt:
        assert attempt.repair is not None
        changes = self._changes(form, attempt.needs)
        for change in changes:
            if change.remedy == FALLBACK:
                say_reference_is_used(start.sites[change.data["site"]], self._chip.name, f"nothing makes its kernel "
                                      f"`{change.kernel}` fit" if change.kernel else "its kernel was refused")
        made = Repair(program=self._program.name, chip=self._chip.name, compiles=self._compiles, probes=self._probes,
                      changes=(*changes, *attempt.repair.changes))
        return replace(attempt, repair=made, tried=tuple(self._tried))

    def _changes(self, form: _Form, needs: Mapping[str, int]) -> tuple[Change, ...]:
        """The choices of a form that are not those of the program as it is."""
        assert self._retracer is not None
        before = self._retracer.chosen
        return tuple(
            change_of(key, self._retracer.sites.get(key) or form.sites[key], before.get(key, 0), index, owned,
                      max((needs[k.fingerprint] for k in form.kernels
                           if k.name in {one.name for one in owned} and k.fingerprint in needs), default=None))
            for key, index in form.chosen.items() if key in form.sites and index != before.get(key, 0)
            for owned in [self._owned.get(key, ())])
