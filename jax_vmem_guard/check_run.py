"""Checks a target for several topologies, each compile in a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from jax_vmem_guard import bounded
from jax_vmem_guard.chips import Chip, chip_named
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rows import ABORTED, ERROR, MEMORY, TIMEOUT, Row

WORKER = "jax_vmem_guard.check_worker"
_VERDICTS = {"aborted": ABORTED, "memory": MEMORY, "timeout": TIMEOUT}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One check.

    Attributes:
      target: a TARGET (`targets.FORMS`).
      topologies: names of topologies or chips.
      policy: what the guard may do.
      bounds: what each compile may take.
      jobs: child processes at a time.
    """

    target: str
    topologies: tuple[str, ...]
    policy: Policy
    bounds: bounded.Bounds
    jobs: int = 1


def run(request: Request, on_progress: Callable[[str, str], None] = lambda topology, program: None
        ) -> tuple[Row, ...]:
    """Compile every program of the target for every topology.

    A child that dies takes one program's verdict with it; the programs after it are compiled by another child.

    Args:
      request: what to check.
      on_progress: called with a topology and the program about to be compiled, and with "" when a topology is done;
        from several threads where `jobs` is more than 1.

    Returns:
      The rows, topologies in the order given.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(request.jobs, len(request.topologies)))) as threads:
        answers = threads.map(lambda topology: _Topology(request, topology, on_progress).run(), request.topologies)
        return tuple(row for rows in answers for row in rows)


class _Topology:
    """All programs of the target on one topology."""

    def __init__(self, request: Request, topology: str, on_progress: Callable[[str, str], None]):
        self._request, self._on_progress = request, on_progress
        self._chip: Chip = chip_named(topology)
        self._topology = topology if ":" in topology else self._chip.topology
        self._rows: list[Row] = []
        self._at: tuple[int, str] | None = None  # number and name of the program being compiled
        self._next = 0
        self._over = False

    def run(self) -> Sequence[Row]:
        while not self._over:
            self._at = None
            message = {"target": self._request.target, "topology": self._topology, "start": self._next,
                       "policy": asdict(self._request.policy)}
            ended = bounded.run(WORKER, message, self._on_event, self._request.bounds)
            if ended.how != "ok":
                self._lost(ended)
            elif not self._over:
                self._lost(bounded.Ended("aborted", "the process ended without an answer"))
        self._on_progress(self._topology, "")
        return self._rows

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "begin":
                self._at = (event["number"], event["program"])
                self._on_progress(self._topology, event["program"])
            case "judged":
                self._rows += [Row.from_dict(row) for row in event["rows"]]
                self._next, self._at = event["number"] + 1, None
            case "failed":
                self._add(self._request.target, ERROR, event["text"])
                self._over = True
            case "done":
                self._over = True

    def _lost(self, ended: bounded.Ended) -> None:
        """The child is gone: a verdict for the program it was at, and on to the next one."""
        if self._at is None:
            self._add(self._request.target, _VERDICTS[ended.how], f"{ended.words}, before a program was compiled")
            self._over = True
            return
        number, program = self._at
        self._add(program, _VERDICTS[ended.how], ended.words)
        self._next = number + 1

    def _add(self, program: str, verdict: str, reason: str) -> None:
        self._rows.append(Row(program=program, kernel=program, topology=self._topology, chip=self._chip.name,
                              verdict=verdict, capacity_bytes=self._chip.capacity_bytes, reason=reason))
