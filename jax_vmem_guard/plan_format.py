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
      fingerprint: `Kernel.fingerprint` of the kernel as the user wrote it, before any change.
      kernel: its name, as Pallas gave it.
      source: "file:line" of the `pallas_call`, or None.
      environment: where the outcome was seen.
      outcome: "repaired" (it compiled with `changes`) or "failed" (nothing that was tried made it compile).
      changes: what made it compile; empty for "failed".
      used_bytes: scoped VMEM the compiled kernel really used; None where that is unknown.
      reason: why nothing worked, for "failed"; else None.
      edit: the source edit that would make the changes permanent.
      remedies: the remedies the policy allowed at the time. A failure counts only for a policy that allows no others.
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
    remedies: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, Environment]:
        """What an entry is filed under: a later outcome with the same key replaces it."""
        return self.fingerprint, self.environment


def to_text(entries: Iterable[Entry]) -> str:
    """The plan file that holds `entries`; of two with one key the later counts.

    Order in, dictionaries' order and the process make no difference to the bytes.

    Raises:
      TypeError, ValueError: when a change's `data` is not JSON.
    """
    by_key = {entry.key: entry for entry in entries}
    ordered = sorted(by_key.values(), key=lambda e: (e.kernel, e.fingerprint, e.environment))
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
    seen: set[tuple[str, Environment]] = set()
    for i, entry in enumerate(entries):
        if entry.key in seen:
            raise MalformedPlan(f"entries[{i}] says for a second time what happened to `{entry.kernel}` "
                                f"({entry.fingerprint}) on {entry.environment}; keep one of them")
        seen.add(entry.key)
    return entries


def _entry(raw: Any, where: str) -> Entry:
    fields = _fields(raw, Entry, where, optional=("remedies",))
    environment = _record(raw["environment"], Environment, f"{where}.environment")
    _expect(isinstance(raw["changes"], list), f"{where}.changes", "a list")
    changes = tuple(_record(change, Change, f"{where}.changes[{i}]", optional=("data",))
                    for i, change in enumerate(raw["changes"]))
    _expect(raw["outcome"] in _OUTCOMES, f"{where}.outcome", f"one of {', '.join(_OUTCOMES)}")
    _expect((raw["outcome"] == "failed") == (not changes), f"{where}.changes",
            'empty when the outcome is "failed", and only then')
    remedies = raw.get("remedies", [])
    _expect(isinstance(remedies, list) and all(isinstance(r, str) for r in remedies), f"{where}.remedies",
            "a list of strings")
    return Entry(**(fields | {"environment": environment, "changes": changes, "remedies": tuple(remedies)}))


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
    "dict[str, Any]": (lambda v: isinstance(v, dict), "an object"),
}
