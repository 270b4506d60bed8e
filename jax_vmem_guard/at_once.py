"""Calls of declared functions outside of any program: each choice runs at once, until one compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from jax_vmem_guard import declared
from jax_vmem_guard.chips import chip_for_device_kind
from jax_vmem_guard.choice_order import passed_over
from jax_vmem_guard.choice_records import change_of, say_reference_is_used
from jax_vmem_guard.declared import FALLBACK, TUNABLE, Declaration
from jax_vmem_guard.diagnosis import diagnose
from jax_vmem_guard.journal import Repair, journal
from jax_vmem_guard.refused import first_line, refused_before_compile, refused_by_compiler


def call_at_once(declaration: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of the first choice whose programs compile: first with what is cheap, then with all remedies.

    Raises:
      What the first choice raised, where no choice compiles.
    """
    first: Exception | None = None
    failed: list[int] = []
    for cheaply, index in _order(declaration):
        if cheaply and passed_over([choice.keywords for choice in declaration.choices], index, failed) is not None:
            continue
        with declared.cheap_remedies_first() if cheaply else contextlib.nullcontext():
            try:
                result = declaration.choices[index](*args, **kwargs)
            except Exception as error:
                if not _is_reason(declaration, error):
                    if first is None:
                        raise
                    continue  # a later choice may not suit these arguments at all
                first = first or error
                failed.append(index)
                continue
        if first is not None:
            _record(declaration, index, first)
        return result
    assert first is not None
    words = ", ".join(choice.words for choice in declaration.choices)
    first.add_note(f"jax_vmem_guard: no declared choice of `{declaration.name}` ({declaration.where}) fits: {words}")
    raise first


def _order(declaration: Declaration) -> list[tuple[bool, int]]:
    every = range(len(declaration.choices))
    if declaration.kind == TUNABLE and len(every) > 1:
        return [(True, index) for index in every] + [(False, index) for index in every]
    return [(False, index) for index in every]


def _is_reason(declaration: Declaration, error: Exception) -> bool:
    if diagnose(error) is not None:
        return "vmem" in declaration.reasons
    return "lowering" in declaration.reasons and (refused_before_compile(error) or refused_by_compiler(error))


def _record(declaration: Declaration, index: int, error: Exception) -> None:
    if index == 0:  # the first choice after all, with costlier remedies; that repair has its own record
        return
    kind = jax.devices()[0].device_kind
    chip = chip_for_device_kind(kind)
    where = chip.name if chip is not None else kind
    if declaration.kind == FALLBACK:
        say_reference_is_used(declaration, where, first_line(error))
    journal.record(Repair(program=declaration.name, chip=where, compiles=index + 1, probes=0,
                          changes=(change_of(declaration.name, declaration, 0, index, (), None),)))
