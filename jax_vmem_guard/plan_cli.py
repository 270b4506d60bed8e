"""`jax-vmem-guard plan show|check|prune FILE`: a plan file reviewed, checked in CI, and cleaned up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from jax_vmem_guard.plan_file import PlanFile, installed_versions
from jax_vmem_guard.plan_format import Entry, to_text

_MIB = 1 << 20
_UNUSABLE = 2


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `plan` command; `run` executes what it parsed."""
    plan = subparsers.add_parser("plan", help="look at, check or clean up a plan file",
                                 description="A plan file holds what the guard learned about kernels that ran out of "
                                             "VMEM. None of these commands needs a TPU or starts JAX.")
    plan.set_defaults(run=run)
    actions = plan.add_subparsers(dest="plan_action", required=True, metavar="show|check|prune")

    show = actions.add_parser("show", help="list the outcomes")
    show.add_argument("--json", action="store_true", help="print the file's canonical text instead of a table")
    check = actions.add_parser("check", help="exit 1 when an entry would not be applied with the jax and libtpu that "
                                             "are installed, 2 when the file cannot be used")
    prune = actions.add_parser("prune", help="remove entries of other jax and libtpu versions")
    prune.add_argument("--failed", action="store_true", help="remove failures too, so that they are tried again")
    prune.add_argument("--kernel", action="append", default=[], metavar="NAME",
                       help="remove the entries of this kernel, whatever their versions (may be repeated)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    versions = installed_versions()
    for action in (show, check, prune):
        action.add_argument("file", metavar="FILE")
    for action in (check, prune):
        action.add_argument("--jax", default=versions[0], metavar="VERSION",
                            help="the jax version that counts (installed: %(default)s)")
        action.add_argument("--libtpu", default=versions[1], metavar="VERSION",
                            help="the libtpu version that counts (installed: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Executes a parsed `plan` command and gives its exit code: 0, 1 (check: entries do not apply) or 2."""
    plan = PlanFile(args.file)
    try:
        return {"show": _show, "check": _check, "prune": _prune}[args.plan_action](plan, args)
    except (OSError, ValueError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return _UNUSABLE


def _show(plan: PlanFile, args: argparse.Namespace) -> int:
    entries = plan.read()
    if args.json:
        print(to_text(entries), end="")
    else:
        _print_entries(entries)
        for entry in entries:
            if entry.edit:
                print(f"\n{_title(entry)}:\n  {entry.edit}")
    return 0


def _check(plan: PlanFile, args: argparse.Namespace) -> int:
    entries = plan.read()
    stale = _elsewhere(entries, args)
    covered = {(e.fingerprint, e.environment.chip) for e in entries if e not in stale}
    uncovered = [e for e in stale if (e.fingerprint, e.environment.chip) not in covered]
    failed = [e for e in entries if e not in stale and e.outcome == "failed"]
    for entry in uncovered:
        print(f"{_title(entry)} is known for {entry.environment} only; it would be looked at again under "
              f"jax {args.jax}, libtpu {args.libtpu}")
    for entry in failed:
        print(f"{_title(entry)} does not compile on {entry.environment}: {entry.reason or 'nothing worked'}")
    print(f"{args.file}: {_count(entries, 'entry', 'entries')}, {len(stale)} of other versions, {len(failed)} failed")
    return 1 if uncovered else 0


def _prune(plan: PlanFile, args: argparse.Namespace) -> int:
    removed: list[Entry] = []

    def keep(entries: Sequence[Entry]) -> list[Entry]:
        elsewhere = _elsewhere(entries, args)
        removed[:] = [e for e in entries if e in elsewhere or (args.failed and e.outcome == "failed")
                      or e.kernel in args.kernel]
        return [e for e in entries if e not in removed]

    entries = plan.read()  # raises for a file that is missing or unusable, before `update` would start a new one
    if args.dry_run:
        keep(entries)
    else:
        plan.update(keep)
    for entry in removed:
        print(f"{'would remove' if args.dry_run else 'removed'} {_title(entry)}, {entry.environment}, {entry.outcome}")
    print(f"{args.file}: {_count(removed, 'entry', 'entries')} {'to remove' if args.dry_run else 'removed'}, "
          f"{len(entries) - len(removed)} kept")
    return 0


def _elsewhere(entries: Iterable[Entry], args: argparse.Namespace) -> list[Entry]:
    return [e for e in entries if (e.environment.jax, e.environment.libtpu) != (args.jax, args.libtpu)]


def _print_entries(entries: Sequence[Entry]) -> None:
    header = ("kernel", "source", "chip", "jax", "libtpu", "outcome", "used", "changes")
    rows = [(e.kernel, e.source or "", e.environment.chip, e.environment.jax, e.environment.libtpu, e.outcome,
             "" if e.used_bytes is None else f"{e.used_bytes / _MIB:.2f} MiB",
             "; ".join(f"{c.before} -> {c.after}" for c in e.changes) or e.reason or "") for e in entries]
    try:
        from rich import print as rich_print
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for row in (header, *rows):
            print("\t".join(row))
    else:
        table = Table(*header)
        for row in rows:
            table.add_row(*map(Text, row))
        rich_print(table)


def _title(entry: Entry) -> str:
    return f"`{entry.kernel}`" + (f" ({entry.source})" if entry.source else "")


def _count(items: Sequence[Entry], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}"
