"""What `check` and `rehearse` print and write: a table, JSON, a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jax_vmem_guard.matrix import grouped, plain_text, remarks, rich_table, table
from jax_vmem_guard.policy import is_off, policy_from_environment
from jax_vmem_guard.rows import Row, exit_code, summary

NOTHING = ("No TPU kernels were found. If the program picks its kernels by `jax.default_backend()`, it saw a CPU: let it "
           "take the TPU's way.")

WIDE = 100
"""Characters of a terminal from which the table with bars is readable; narrower ones, and files, get plain lines."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of both commands."""
    parser.add_argument("--mode", choices=("fix", "report", "off"), default=None,
                        help="fix (default): judge with the guard's repairs; report or off: judge the program as it is")
    parser.add_argument("--remedies", metavar="LIST", help="remedies that are allowed, separated by commas")
    parser.add_argument("--max-share", type=_share, metavar="SHARE",
                        help="fail where a kernel needs more than this share of the chip's VMEM: 0.8 keeps 20%% free")
    parser.add_argument("--json", metavar="FILE", dest="json_file", help="write the rows as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", dest="html_file", help="write the rows as one self-contained page")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give a number above 0 and at most 1, as in 0.8")
    return share


def policy_values(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the `Policy` that the options ask for, and the environment where they do not.

    A plan file is left out: it remembers what happened, not what was tried for a chip that is not here.

    Raises:
      ValueError: a variable of the environment has a value that is not allowed.
    """
    asked = policy_from_environment()
    values: dict[str, Any] = {field.name: getattr(asked, field.name) for field in fields(asked)}
    values["plan_file"] = None
    values["mode"] = options.mode or ("fix" if is_off() else asked.mode)
    if options.remedies:
        values["remedies"] = tuple(word.strip() for word in options.remedies.split(",") if word.strip())
    return values


def report(rows: Sequence[Row], options: argparse.Namespace, *, title: str) -> int:
    """Print and write what the options ask for; returns the exit code (2 where there was no kernel to judge)."""
    code = exit_code(rows, max_share=options.max_share) if rows else 2
    rows = grouped(rows)
    if options.html_file:
        from jax_vmem_guard.html import page

        Path(options.html_file).write_text(page(rows, title=title), encoding="utf-8")
    if options.json_file:
        text = json.dumps({"title": title, "exit_code": code, "rows": [row.to_dict() for row in rows]}, indent=2)
        if options.json_file == "-":
            print(text)
            return code
        Path(options.json_file).write_text(text + "\n", encoding="utf-8")
    _print(rows, options, title)
    return code


def _print(rows: Sequence[Row], options: argparse.Namespace, title: str) -> None:
    if not rows:
        print(NOTHING)
        return
    try:
        from rich.console import Console
    except ImportError:
        print(title, plain_text(rows, max_share=options.max_share), summary(rows), sep="\n")
        return
    console = Console()
    if console.is_terminal and console.width >= WIDE:
        console.print(rich_table(rows, title=title, width=console.width, max_share=options.max_share))
    else:
        for line in (title, *(line for line, _ in table(rows, max_share=options.max_share))):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for remark in remarks(rows, max_share=options.max_share):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{summary(rows)}", markup=False, highlight=False, soft_wrap=True)


def complain(command: str, problem: object) -> int:
    """Say on standard error why a command cannot do what it was asked; returns exit code 2."""
    print(f"jax-vmem-guard {command}: {problem}", file=sys.stderr)
    return 2
