"""The console script `jax-vmem-guard`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from jax_vmem_guard import __version__, check_cli, demo, plan_cli, rehearse_cli, run_script
from jax_vmem_guard.policy import MODES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax-vmem-guard", description="Makes JAX programs compile when a Pallas TPU kernel runs out of scoped VMEM.")
    parser.add_argument("--version", action="version", version=f"jax_vmem_guard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="run a script or a module with the guard installed",
                              usage="jax-vmem-guard run [--mode MODE] (SCRIPT | -m MODULE) [ARGS ...]")
    run.add_argument("--mode", choices=[mode for mode in MODES if mode != "off"], default=None,
                     help="fix (default) or report")
    run.add_argument("-m", dest="module", action="store_true", help="TARGET is a module, as in python -m")
    run.add_argument("target", metavar="TARGET", help="script to run")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    run.set_defaults(run=run_script.run)

    explain = commands.add_parser("explain", help="say in words what a compiler message means and what to do")
    explain.add_argument("file", nargs="?", default="-", help="a log file, or - for standard input (default)")
    explain.set_defaults(run=_explain)

    demo.add_parser(commands)
    check_cli.add_parser(commands)
    rehearse_cli.add_parser(commands)
    plan_cli.add_parser(commands)
    return parser


def _explain(options: argparse.Namespace) -> int:
    from jax_vmem_guard.explain import explain_log

    if options.file == "-":
        text = sys.stdin.read()
    else:
        try:
            with open(options.file, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError as error:
            print(f"jax-vmem-guard explain: cannot read {options.file!r}: {error.strerror}. Give the path of a log file, "
                  "or - to read standard input.", file=sys.stderr)
            return 2
    words, code = explain_log(text)
    print(words)
    return code


def log_to_stderr() -> None:
    """Show the guard's log lines. Only commands do this; the library adds no handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jax_vmem_guard: %(message)s"))
    logger = logging.getLogger("jax_vmem_guard")
    logger.addHandler(handler)
    logger.propagate = False
