"""Many hosts: no process compiles a changed program before all that run it have agreed on the change.

Two hosts that compile different programs wait for each other for ever once these run. A plan follows from the program,
the chip, the compiler and the policy, so the processes of a job come to the same one by themselves; here they make
sure, through the key-value store of JAX's coordination service. Nothing here runs for a program that compiles as it is.

The protocol, for one program and one round (a round is one changed program that is about to be compiled): each process
puts up a message with its facts (guard version, policy, versions) and its plan. The leader - the process with the
lowest number of those that run the program - reads all messages and puts up one verdict: its own plan, or an error that
names the first difference. The others read the verdict. A process that will not change the program says so without
waiting. Verdicts stay, so a process that compiles the program again gets the same answer at once, whatever the others
do then. Every wait is bounded; who did not come is named.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.locks import ForkSafeLock

__all__ = ["AgreementError", "agree", "decline", "from_leader"]

_ROOT = "jax_vmem_guard"
_SLICE_S = 1.0  # a wait is cut into slices, so that Ctrl-C gets through and other processes' answers are looked at
_SAY_AFTER_S = 15.0  # JAX ends a job whose process died after 100 s by default: say before that for whom we wait
_GRACE_S = 5.0  # the leader's verdict names who is missing: give it time to arrive

_logger = logging.getLogger("jax_vmem_guard")


class AgreementError(RuntimeError):
    """The processes of a distributed program do not agree on how to repair it, or one of them did not take part."""


def agree(program_key: str, plan_json: str, *, timeout_s: float, processes: Iterable[int] | None = None,
          facts: Mapping[str, Any] | None = None, attempt: int = 0, remembered: bool = False,
          only_words: Iterable[str] = ()) -> str:
    """The plan that all processes of a program apply; returns once they agree.

    Call it before a changed program is compiled, never for one that compiles as it is.

    Args:
      program_key: names the program, the same on every process; what stands before an "@" is for people.
      plan_json: what this process would do, as canonical JSON.
      timeout_s: seconds to wait for the other processes.
      processes: numbers of the processes that run the program; all of the job if None.
      facts: what must be the same everywhere besides the plan: name -> JSON value.
      attempt: how many changed forms of the program were compiled before this one.
      remembered: the plan comes from a plan file. The leader's counts then, so it is not compared.
      only_words: names of fields in the plan that say the same thing in words, and may differ: paths of sources.

    Returns:
      The leader's plan; `plan_json` at once where only one process runs the program.

    Raises:
      AgreementError: on every process alike, with the first difference or the processes that did not take part.
    """
    talk = _Talk.about(program_key, processes, facts, attempt)
    if talk is None:
        return plan_json
    message = {"facts": dict(facts or {}), "plan": plan_json, "remembered": remembered, "declined": None,
               "only_words": sorted(only_words)}
    try:
        verdict = talk.propose(message, timeout_s)
    except ConnectionError as error:
        raise AgreementError(talk.in_words(
            f"JAX's coordination service, in process 0, does not answer ({_first_line(error)}).")) from error
    if verdict["error"] is not None:
        raise AgreementError(verdict["error"])
    return verdict["plan"]


def decline(program_key: str, reason: str, *, processes: Iterable[int] | None = None,
            facts: Mapping[str, Any] | None = None, attempt: int = 0) -> None:
    """Tells the others that this process will not change the program, so that none waits for it. Never waits, never
    raises: it is called where the compiler's own error is about to be raised.

    Args:
      program_key, processes, facts, attempt: as for `agree`.
      reason: why, as a sentence without a full stop.
    """
    try:
        talk = _Talk.about(program_key, processes, facts, attempt)
        if talk is not None:
            talk.put_up({"facts": dict(facts or {}), "plan": None, "remembered": False, "declined": reason})
    except Exception as error:
        _logger.debug("could not tell the other processes about `%s`: %s", _name(program_key), error)


def from_leader(topic: str, text: str, *, timeout_s: float, processes: Iterable[int] | None = None) -> str | None:
    """What the leader said about `topic`, the first time it was asked; None if it did not within `timeout_s`.

    Each process asks once per topic and leader: it keeps the answer, also that there was none, which it logs.

    Args:
      topic: what is asked for, the same on every process.
      text: what this process would say; the leader's counts.
      timeout_s: seconds to wait for the leader. The leader itself does not wait.
      processes: numbers of the processes concerned; all of the job if None.
    """
    talk = _Talk.about(topic, processes, None, 0)
    if talk is None:
        return text
    with _answers_lock:
        if talk.base not in _answers:
            _answers[talk.base] = talk.ask_leader(topic, text, timeout_s)
        return _answers[talk.base]


class _Talk:
    """One round about one program."""

    def __init__(self, store: _jax.KeyValueStore, program_key: str, processes: tuple[int, ...], number: int):
        self.store = store
        self.program_key = program_key
        self.processes = processes
        self.leader = processes[0]
        self.base = f"{_ROOT}/{hashlib.sha256(program_key.encode()).hexdigest()[:24]}/{self.leader}/{number}"

    @classmethod
    def about(cls, program_key: str, processes: Iterable[int] | None, facts: Mapping[str, Any] | None,
              attempt: int) -> _Talk | None:
        """The round, or None where nobody else runs the program."""
        store = _jax.key_value_store()
        if store is None:
            return None
        concerned = tuple(sorted(processes if processes is not None else range(store.num_processes)))
        if concerned == (store.process_id,) or store.process_id not in concerned:
            return None
        return cls(store, program_key, concerned, _round_number(program_key, facts, attempt))

    @property
    def leads(self) -> bool:
        return self.store.process_id == self.leader

    def put_up(self, message: dict[str, Any]) -> None:
        """Shows this process's message. A leader that declines has thereby decided."""
        self.store.set(self._key(self.store.process_id), json.dumps(message))
        if self.leads and message["declined"] is not None:
            self._decide(f"process {self.leader} does not change it: {message['declined']}.", None)

    def propose(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        message = json.loads(json.dumps(message))  # as the others see it: tuples are lists
        self.put_up(message)
        if self.leads and self.store.get(f"{self.base}/verdict", 0) is None:
            self._decide(self._collect(message, timeout_s), message["plan"])
        patience = timeout_s + min(_GRACE_S, timeout_s)
        verdict = self.wait_for(f"{self.base}/verdict", patience, f"process {self.leader} to decide")
        if verdict is None:
            return {"error": self.in_words(self._why_no_verdict(timeout_s)), "plan": None}
        return json.loads(verdict)

    def wait_for(self, key: str, timeout_s: float, what: str) -> str | None:
        for left in self._slices(timeout_s, what):
            value = self.store.get(key, left)
            if value is not None:
                return value
        return None

    def ask_leader(self, topic: str, text: str, timeout_s: float) -> str | None:
        key = f"{self.base}/said"
        try:
            if self.leads:
                self.store.set_first(key, text)
            answer = self.wait_for(key, timeout_s, f"what process {self.leader} says")
            why = f"within {timeout_s:g} s (`Policy.agreement_timeout_s`)"
        except ConnectionError as error:
            answer, why = None, f"({_first_line(error)})"
        if answer is None:
            _logger.warning("process %d does not say what its %s holds %s: nothing of it is used", self.leader, topic,
                            why)
        return answer

    def _collect(self, mine: dict[str, Any], timeout_s: float) -> str | None:
        """Reads the others' messages until all are there or one differs; gives what is wrong, or None."""
        missing = [p for p in self.processes if p != self.leader]
        for left in self._slices(timeout_s, "the other processes to propose the same change"):
            if not missing:
                return None
            self.store.get(self._key(missing[0]), left)
            for process in tuple(missing):
                message = self.store.get(self._key(process), 0)
                if message is None:
                    continue
                missing.remove(process)
                if problem := _difference(self.leader, mine, process, json.loads(message)):
                    return problem
        return self._absent(missing, timeout_s) if missing else None

    def _decide(self, problem: str | None, plan: str | None) -> None:
        error = None if problem is None else self.in_words(problem)
        self.store.set_first(f"{self.base}/verdict", json.dumps({"error": error, "plan": plan}))

    def _why_no_verdict(self, timeout_s: float) -> str:
        here = [p for p in self.processes if self.store.get(self._key(p), 0) is not None]
        if self.leader not in here:
            return self._absent([self.leader], timeout_s)
        missing = [p for p in self.processes if p not in here]
        return self._absent(missing, timeout_s) if missing else \
            f"process {self.leader} took part but did not decide within {timeout_s:g} s; it may have died."

    def _absent(self, processes: list[int], timeout_s: float) -> str:
        who = f"process{'' if len(processes) == 1 else 'es'} {', '.join(map(str, processes))}"
        return (f"{who} did not take part within {timeout_s:g} s (`Policy.agreement_timeout_s`). There the guard is "
                "not installed (is JAX_VMEM_GUARD set on every host?), or the program is another one or compiled as it "
                "is, or the process died or is much slower.")

    def in_words(self, problem: str) -> str:
        """The error that every process raises."""
        return (f"the processes that run `{_name(self.program_key)}` do not agree on how to repair it: {problem} No "
                "process compiles a changed program. Give all of them the same program, the same versions and the same "
                "policy, and start them again.")

    def _slices(self, timeout_s: float, what: str) -> Iterable[float]:
        """Seconds for one wait each, until `timeout_s` is over; says once for what we wait."""
        start, said = time.monotonic(), False
        while True:
            passed = time.monotonic() - start
            yield max(0.0, min(_SLICE_S, timeout_s - passed))
            passed = time.monotonic() - start
            if passed >= timeout_s:
                return
            if passed > _SAY_AFTER_S and not said:
                said = True
                _logger.warning("`%s`: waiting for %s (up to %g s)", _name(self.program_key), what, timeout_s)

    def _key(self, process: int) -> str:
        return f"{self.base}/process/{process}"


def _difference(leader: int, mine: dict[str, Any], process: int, theirs: dict[str, Any]) -> str | None:
    """What differs between the leader's message and another's, the first of it."""
    for name in sorted({*mine["facts"], *theirs["facts"]}):
        a, b = mine["facts"].get(name), theirs["facts"].get(name)
        if a != b:
            where, a, b = _first_difference(a, b, name)
            return f"`{where}` is {a} in process {leader} and {b} in process {process}."
    if theirs["declined"] is not None:
        return f"process {process} does not change it: {theirs['declined']}."
    if mine["remembered"] or theirs["remembered"]:
        return None
    plans = [_without(json.loads(message["plan"]), mine["only_words"]) for message in (mine, theirs)]
    if plans[0] == plans[1]:
        return None
    where, a, b = _first_difference(plans[0], plans[1], "plan")
    return f"`{where}` is {a} in process {leader} and {b} in process {process}."


def _without(value: Any, names: list[str]) -> Any:
    """A JSON value without the fields of these names."""
    if isinstance(value, dict):
        return {name: _without(inner, names) for name, inner in value.items() if name not in names}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


def _first_difference(a: Any, b: Any, where: str) -> tuple[str, str, str]:
    """The path to the first place where two JSON values differ, and what stands there."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            if name not in a or name not in b:
                return f"{where}.{name}", _show(a.get(name, "absent")), _show(b.get(name, "absent"))
            if a[name] != b[name]:
                return _first_difference(a[name], b[name], f"{where}.{name}")
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return _first_difference(x, y, f"{where}[{i}]")
        return f"the number of {where}", str(len(a)), str(len(b))
    return where, _show(a), _show(b)


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return repr(text if len(text) <= 200 else text[:200] + "...") if isinstance(value, str) else text[:200]


def _name(program_key: str) -> str:
    return program_key.partition("@")[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_answers_lock = ForkSafeLock()
_answers: dict[str, str | None] = {}  # what leaders said, by what they were asked
_rounds_lock = ForkSafeLock()
_rounds: dict[str, list[str]] = {}  # program -> what this process has talked about, in order: its rounds


def _round_number(program_key: str, facts: Mapping[str, Any] | None, attempt: int) -> int:
    """Counts what a process has to say about a program: equal on all processes that do the same in the same order.

    The facts are not part of the name of a round: processes whose facts differ must meet, to be told so. The same facts
    and attempt are the same round, also later.
    """
    header = json.dumps([dict(facts or {}), attempt], sort_keys=True)
    with _rounds_lock:
        headers = _rounds.setdefault(program_key, [])
        if header not in headers:
            headers.append(header)
        return headers.index(header)
