"""What the guard may do: `Policy`, and how it is read from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MODES = ("fix", "report", "off")
#: Module, program and compile-call remedies in the order of what each costs the running program (docs/remedies.md).
REMEDIES = ("limit", "buffering", "coloring", "split", "compile_limit")
AHEAD = ("certain", "expected", "never")

ENVIRONMENT_PREFIX = "JAX_VMEM_GUARD"
_MODE_WORDS = {"1": "fix", "on": "fix", "true": "fix", "0": "off", "": "off", "false": "off"}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the guard may do to a program whose kernels run out of scoped VMEM.

    Attributes:
      mode: "fix" repairs; "report" changes nothing and adds the diagnosis to the compiler's error; "off" stands aside.
      remedies: kinds of change that are allowed, tried in this order.
      ahead: when to act before the first compile: "certain" where failure is sure (default), "expected" where it is
        likely, "never".
      speculate: where failure is likely but not sure, compile the program and its repaired form at once.
      max_compiles: how often the whole program may be compiled before the guard gives up, the first compile included.
      plan_file: where outcomes are remembered: a path, "auto" (beside JAX's compilation cache), or None.
      bug_report_dir: where bundles for failures that no kernel caused are written, or None.
      agreement_timeout_s: seconds a process of a distributed program waits for the others to agree on a plan.

    Raises:
      ValueError: a field has a value that is not allowed; the message names the allowed ones.
    """

    mode: str = "fix"
    remedies: tuple[str, ...] = REMEDIES
    ahead: str = "certain"
    speculate: bool = False
    max_compiles: int = 8
    plan_file: str | None = None
    bug_report_dir: str | None = None
    agreement_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("ahead", self.ahead, AHEAD)
        if isinstance(self.remedies, str):
            raise ValueError(f"`remedies` must be a tuple of names, got the string {self.remedies!r}; "
                             f"write remedies=({self.remedies!r},)")
        object.__setattr__(self, "remedies", tuple(self.remedies))
        for remedy in self.remedies:
            _check_choice("remedies", remedy, REMEDIES)
        if not isinstance(self.speculate, bool):
            raise ValueError(f"`speculate` must be True or False, got {self.speculate!r}")
        if not isinstance(self.max_compiles, int) or self.max_compiles < 1:
            raise ValueError(f"`max_compiles` must be a whole number of at least 1, got {self.max_compiles!r}")
        if not self.agreement_timeout_s > 0:
            raise ValueError(f"`agreement_timeout_s` must be more than 0 seconds, got {self.agreement_timeout_s!r}")
        for name in ("plan_file", "bug_report_dir"):
            value = getattr(self, name)
            if value is not None:
                if "\0" in os.fspath(value):
                    raise ValueError(f"`{name}` is no path: {value!r} holds a null character")
                object.__setattr__(self, name, os.fspath(value))


def _check_choice(field: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{field}` does not know {value!r}; allowed: {', '.join(allowed)}")


def is_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `JAX_VMEM_GUARD` is unset or turns the guard off."""
    word = environ.get(ENVIRONMENT_PREFIX, "").strip().lower()
    return _MODE_WORDS.get(word, word) == "off"


def policy_from_environment(environ: Mapping[str, str] = os.environ) -> Policy:
    """The policy that `JAX_VMEM_GUARD` and `JAX_VMEM_GUARD_<FIELD>` ask for; mode "off" where they are unset.

    Raises:
      ValueError: a variable has an unknown value, or names no field; the message lists what is allowed.
    """
    word = environ.get(ENVIRONMENT_PREFIX, "").strip().lower()
    mode = _MODE_WORDS.get(word, word)
    if mode not in MODES:
        raise ValueError(f"{ENVIRONMENT_PREFIX}={environ[ENVIRONMENT_PREFIX]!r} is not a mode; use one of fix (also 1, "
                         "on), report, off (also 0, or leave it unset)")
    values: dict[str, Any] = {"mode": mode}
    known = {field.name: field for field in fields(Policy) if field.name != "mode"}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX + "_"):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) + 1:].lower()
        if name not in known:
            allowed = ", ".join(f"{ENVIRONMENT_PREFIX}_{field.upper()}" for field in known)
            raise ValueError(f"{variable} sets nothing; known: {allowed}")
        values[name] = _parse(variable, text, known[name].default)
    try:
        return Policy(**values)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT_PREFIX}_*: {error}") from None


def _parse(variable: str, text: str, default: Any) -> Any:
    """`text` as the type that the field's default has."""
    text = text.strip()
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}[
                text.lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if isinstance(default, (int, float)):
            return type(default)(text)
    except (KeyError, ValueError):
        kind = {bool: "1 or 0", int: "a whole number", float: "a number"}[type(default)]
        raise ValueError(f"{variable}={text!r} must be {kind}") from None
    return text or default
