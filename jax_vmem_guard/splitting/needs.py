"""What a proof leaves behind: the needs that were met, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.ways import Label, Way


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A proof that went through.

    Attributes:
      root: the kernel's frames.
      parts: k.
      labels: of every reference that is read or written.
      values: the labels each value is needed under: (frame number, variable) -> labels.
      ways: how each needed part is had: (frame number, equation position, output, dimension) -> way.
      chunked: numbers of the loop bodies that run over the chunks of one part only.
    """

    root: Frame
    parts: int
    labels: Mapping[RefId, Label]
    values: Mapping[tuple[int, Any], tuple[Label, ...]]
    ways: Mapping[tuple[int, int, int, int], Way]
    chunked: frozenset[int] = frozenset()

    def of(self, frame: Frame, var: Any) -> tuple[Label, ...]:
        return self.values.get((frame.number, var), ())
