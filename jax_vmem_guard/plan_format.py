"""The text of a plan file: entries to JSON and back, strictly, and always the same bytes for the same entries.

Pure, and free of JAX: reviewing, checking and pruning a plan file need neither.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.changes import Change

FORMAT = 1
_ABOUT = ("What jax_vmem_guard learned about kernels that ran out of scoped VMEM. Review and commit it like code; "
          "bytes are bytes; an entry counts only for its own chip, jax and libtpu.")
_OUTCOMES = ("repaired", "failed")


class MalformedPlan(ValueError):
    """The text is not a plan file; the message says where and what is wrong."""


class NewerPlan(ValueError):
    """The text is a plan file of a later format than this version reads."""


@dataclass(frozen=True, kw_only=True, order=True)
class Environment:
    """What an outcome depends on besides the kernel: another chip or compiler may need other changes.

    Attributes:
      chip: short chip name ("v5e").
      jax: version of jax ("0.10.2").
      libtpu: version of libtpu ("0.0.52"), or what the compiler calls itself where that is not installed as a package.
    """

    chip: str
    jax: str
    libtpu: str

    def __str__(self) -> str:
        return f"{self.chip}, jax {self.jax}, libtpu {self.libtpu}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The outcome for one kernel in one environment.

    Attributes:
      fingerprint: `Kernel.fingerprint` of the kernel as the user wrote it, before any change. For a change of a whole
        compile: the program's digest.
      kernel: its name, as Pallas gave it.
      source: "file:line" of the `pallas_call`, or None.
      environment: where the outcome was seen.
      outcome: "repaired" (it compiled with `changes`) or "failed" (nothing that was tried made it compile).
      changes: what made it compile; empty for "failed".
      used_bytes: scoped VMEM the compiled kernel really used; None where that is unknown.
      reason: why nothing worked, for "failed"; else None.
      edit: the source edit that would make the changes permanent.
      programs: digests of the programs in which that was the outcome, the latest last. Only in these does the entry
        count before the compiler has spoken: in another program the same kernel may compile as it is.
      remedies: the remedies the policy allowed at the time. A failure counts only for a policy that allows no others.
      guard: version of jax_vmem_guard. A failure counts only for the same version.
    """

    fingerprint: str
    kernel: str
    source: str | None
    environment: Environment
    outcome: str
    changes: tuple[Change, ...]
    used_bytes: int | None
    reason: str | None
    edit: str
    programs: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    guard: str = ""

    @property
    def place(self) -> tuple[str, Environment]:
        """The kernel and the environment. Several entries have the same place if programs need different changes."""
        return self.fingerprint, self.environment

    @property
    def key(self) -> tuple[str, Environment, str]:
        """Place and outcome. What a change is, its remedy and data say; a source line that moved makes no difference."""
        what = [[change.remedy, change.data] for change in self.changes]
        return *self.place, json.dumps(what, sort_keys=True, allow_nan=False)


_MOST_PROGRAMS = 32  # an entry that many variants of a program share stays readable


def merged(old: Iterable[Entry], new: Iterable[Entry]) -> tuple[Entry, ...]:
    """What is known after `new` was learned: a program's latest outcome for a kernel replaces its earlier one."""
    known = {entry.key: entry for entry in old}
    for entry in new:
        for key, other in tuple(known.items()):
            if other.place != entry.place:
                continue
            rest = tuple(program for program in other.programs if program not in entry.programs)
            if key == entry.key:
                entry = dataclasses.replace(entry, programs=rest + entry.programs)
            elif rest:
                known[key] = dataclasses.replace(other, programs=rest)
            else:
                del known[key]
        known[entry.key] = dataclasses.replace(entry, programs=entry.programs[-_MOST_PROGRAMS:])
    return tuple(known.values())


def by_fingerprint(entries: Iterable[Entry]) -> dict[str, tuple[Entry, ...]]:
    """Entries grouped by kernel; several for one where programs need different changes."""
    found: dict[str, tuple[Entry, ...]] = {}
    for entry in entries:
        found[entry.fingerprint] = (*found.get(entry.fingerprint, ()), entry)
    return found


def to_text(entries: Iterable[Entry]) -> str:
    """The plan file that holds `entries`, which all have different keys.

    Order in, dictionaries' order and the process make no difference to the bytes.

    Raises:
      TypeError, ValueError: when a change's `data` is not JSON.
    """
    ordered = sorted(entries, key=lambda e: (e.kernel, *e.key))
    content = {"about": _ABOUT, "format": FORMAT, "entries": [dataclasses.asdict(entry) for entry in ordered]}
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def from_text(text: str) -> tuple[Entry, ...]:
    """The entries of a plan file's text.

    Raises:
      NewerPlan: the format is a later one.
      MalformedPlan: anything else that `to_text` would not write; the message names the entry and the field.
    """
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedPlan(f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise MalformedPlan("it is not a plan file: the top level must be an object with an integer `format`")
    if content["format"] > FORMAT:
        raise NewerPlan(f"it has format {content['format']}, this version reads up to {FORMAT}")
    if content["format"] != FORMAT or not isinstance(content.get("entries"), list):
        raise MalformedPlan(f"a plan file has `format` {FORMAT} and a list of `entries`")
    entries = tuple(_entry(raw, f"entries[{i}]") for i, raw in enumerate(content["entries"]))
    seen: set[tuple[Any, ...]] = set()
    for i, entry in enumerate(entries):
        for fact in (entry.key, *((*entry.place, "in", program) for program in entry.programs)):
            if fact in seen:
                raise MalformedPlan(f"entries[{i}] says for a second time what happened to `{entry.kernel}` "
                                    f"({entry.fingerprint}) on {entry.environment}; keep one of them")
            seen.add(fact)
    return entries


def _entry(raw: Any, where: str) -> Entry:
    fields = _fields(raw, Entry, where, optional=("programs", "remedies", "guard"))
    environment = _record(raw["environment"], Environment, f"{where}.environment")
    _expect(isinstance(raw["changes"], list), f"{where}.changes", "a list")
    changes = tuple(_record(change, Change, f"{where}.changes[{i}]", optional=("data",))
                    for i, change in enumerate(raw["changes"]))
    _expect(raw["outcome"] in _OUTCOMES, f"{where}.outcome", f"one of {', '.join(_OUTCOMES)}")
    _expect((raw["outcome"] == "failed") == (not changes), f"{where}.changes",
            'empty when the outcome is "failed", and only then')
    lists = {name: tuple(raw.get(name, ())) for name in ("programs", "remedies")}
    return Entry(**(fields | lists | {"environment": environment, "changes": changes}))


def _record(raw: Any, record: type, where: str, optional: tuple[str, ...] = ()) -> Any:
    return record(**_fields(raw, record, where, optional))


def _fields(raw: Any, record: type, where: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """`raw` as keyword arguments of `record`: the right names, and the right plain types."""
    _expect(isinstance(raw, dict), where, "an object")
    types = {field.name: str(field.type) for field in dataclasses.fields(record)}
    for name in raw:
        _expect(name in types, f"{where}.{name}", f"absent; the fields are {', '.join(types)}")
    for name, kind in types.items():
        _expect(name in raw or name in optional, f"{where}.{name}", "present")
        if name in raw and kind in _PLAIN:
            holds, what = _PLAIN[kind]
            _expect(holds(raw[name]), f"{where}.{name}", what)
    return dict(raw)


def _expect(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise MalformedPlan(f"`{where}` must be {what}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {  # by annotation, as `from __future__` keeps it: a string
    "str": (lambda v: isinstance(v, str), "a string"),
    "str | None": (lambda v: v is None or isinstance(v, str), "a string or null"),
    "int | None": (lambda v: v is None or (type(v) is int and v >= 0), "a number of bytes or null"),
    "tuple[str, ...]": (lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of strings"),
    "dict[str, Any]": (lambda v: isinstance(v, dict), "an object"),
}
