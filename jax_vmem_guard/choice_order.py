"""Which declared choices are worth trying after one failed. Pure.

Choices are ordered in part: by the numbers in them. A choice in which every number asks for as much as in one that
failed cannot need less, so it is passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Path = tuple[Any, ...]


def passed_over(choices: Sequence[Mapping[str, Any]], index: int, failed: Collection[int]) -> int | None:
    """The failed choice that choice `index` is at least as large as in everything, or None.

    Which way a number asks for more is read from the declaration, which goes from the best choice to the one that fits
    where nothing else does: a number that ends larger than it began (a number of parts) asks for more where it is
    smaller, any other (a block size) where it is larger. Everything else in two choices has to be equal for one of them
    to count as larger.
    """
    flat = [_flat(choice) for choice in choices]
    direction = {path: -1 if value > flat[0][path] else 1 for path, value in flat[-1].items()
                 if _is_number(value) and _is_number(flat[0].get(path))}
    for other in failed:
        if other != index and _at_least(flat[index], flat[other], direction):
            return other
    return None


def _at_least(one: Mapping[Path, Any], other: Mapping[Path, Any], direction: Mapping[Path, int]) -> bool:
    if one.keys() != other.keys():
        return False
    for path, value in one.items():
        sign = direction.get(path, 0)
        if sign and _is_number(value) and _is_number(other[path]):
            if sign * value < sign * other[path]:
                return False
        elif not _same(value, other[path]):
            return False
    return True


def _flat(value: Any, path: Path = ()) -> dict[Path, Any]:
    """The leaves of a value: of mappings, tuples, lists and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    else:
        return {path: value}
    return {p: leaf for key, part in items for p, leaf in _flat(part, (*path, key)).items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:  # values whose equality is no truth value
        return False

