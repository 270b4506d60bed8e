"""`jax-vmem-guard check`: do these kernels fit those chips?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from jax_vmem_guard import check_run, output
from jax_vmem_guard.bounded import Bounds, available_bytes
from jax_vmem_guard.chips import CHIPS, chip_named
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.targets import FORMS

DESCRIPTION = f"""Compiles for chips that are not here, with the real TPU compiler, and prints for each kernel and chip
what it needs, its limit, what the chip has, and whether it fits. TARGET is {FORMS.replace("`", "")}. The function
returns (fun, args) or (fun, args, kwargs), or yields several; arguments are arrays or jax.ShapeDtypeStruct. Exit code:
0 all fit, 1 one does not, 2 one could not be judged."""


def add_parser(commands: Any) -> None:
    """Add the command to a parser's subparsers; `options.run` is what runs it."""
    parser = commands.add_parser("check", help="compile for chips that are not here: do the kernels fit?",
                                 description=DESCRIPTION)
    parser.add_argument("target", metavar="TARGET", help="module:function, file.py:function, or a StableHLO or export file")
    parser.add_argument("--topology", action="append", metavar="NAME",
                        help="chip or topology, as in v5e or v5e:2x2; may be given several times (default: "
                             f"{', '.join(chip.name for chip in CHIPS[2:])})")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                        help="for the compiles of one program for one topology (default 600)")
    parser.add_argument("--memory", type=float, metavar="GIB",
                        help="for each compiling process (default: what is free, less 1 GiB, divided by -j)")
    parser.add_argument("-j", "--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N",
                        help="compiling processes at a time (default: the number of processors, at most 4)")
    output.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    names = options.topology or [chip.name for chip in CHIPS[2:]]
    try:
        topologies = tuple(dict.fromkeys(name if ":" in name else chip_named(name).topology for name in names))
        for name in topologies:
            chip_named(name)
        policy = Policy(**output.policy_values(options))
    except ValueError as error:
        return output.complain("check", error)
    if options.jobs < 1 or options.timeout <= 0 or (options.memory is not None and options.memory <= 0):
        return output.complain("check", "-j, --timeout and --memory must be more than 0")
    if importlib.util.find_spec("libtpu") is None:
        return output.complain("check", "the TPU compiler is not installed: pip install 'jax_vmem_guard[tpu]'")
    jobs = min(options.jobs, len(topologies))
    request = check_run.Request(target=options.target, topologies=topologies, policy=policy, jobs=jobs,
                                bounds=Bounds(options.timeout, _memory(options.memory, jobs)))
    with _progress(len(topologies)) as on_progress:
        rows = check_run.run(request, on_progress)
    return output.report(rows, options, title=f"{options.target}: scoped VMEM, MiB")


def _memory(gib: float | None, jobs: int) -> int | None:
    if gib is not None:
        return int(gib * 2**30)
    available = available_bytes()
    return None if available is None else max(2**30, (available - 2**30) // jobs)


@contextmanager
def _progress(total: int) -> Any:
    """Shows which program is being compiled for which topology; silent where standard error is no terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda topology, program: None
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        yield _shower(progress, progress.add_task("starting", total=total))


def _shower(progress: Any, task: Any) -> Callable[[str, str], None]:
    at: dict[str, str] = {}
    lock = threading.Lock()

    def show(topology: str, program: str) -> None:
        with lock:
            if program:
                at[topology] = program
            else:
                at.pop(topology, None)
                progress.advance(task)
            progress.update(task, description=", ".join(f"{where}: {what}" for where, what in at.items()))

    return show
