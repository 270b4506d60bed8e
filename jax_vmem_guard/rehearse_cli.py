"""`jax-vmem-guard rehearse`: run a training script on this CPU while it is compiled for chips elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from jax_vmem_guard import output
from jax_vmem_guard.bounded import how_it_ended
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rehearsal import OUTPUTS
from jax_vmem_guard.rows import ABORTED, Row

DESCRIPTION = """Runs a script, unmodified, on this machine's CPU: Pallas TPU kernels run in interpret mode, and each
program that holds some is also compiled for the topology, under the guard. Ends with what each kernel needs there.
Exit code: that of the script if it failed; else 0 all fit, 1 one does not, 2 one could not be judged."""


def add_parser(commands: Any) -> None:
    """Add the command to a parser's subparsers; `options.run` is what runs it."""
    parser = commands.add_parser("rehearse", help="run a training script on this CPU while it is compiled for a TPU",
                                 description=DESCRIPTION,
                                 usage="jax-vmem-guard rehearse [--topology NAME] [options] (SCRIPT | -m MODULE) [ARGS ...]")
    parser.add_argument("--topology", action="append", default=[], metavar="NAME", help="chip or topology (default v5e:2x2)")
    parser.add_argument("--outputs", choices=OUTPUTS, default="interpret",
                        help="interpret (default): kernels compute, slowly; zeros: they give zeros at once")
    parser.add_argument("--devices", type=int, metavar="N",
                        help="CPU devices to stand for the topology's chips (default: as XLA_FLAGS says, else 1)")
    output.add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code.

    The script runs in a child process, for the compiler can abort the process that called it. What was judged until
    then is not lost.
    """
    try:
        if len(options.topology) > 1:
            raise ValueError(f"a script is rehearsed for one topology at a time, got {', '.join(options.topology)}; run the "
                             "command once for each")
        [wanted] = options.topology or ["v5e:2x2"]
        topology = wanted if ":" in wanted else chip_named(wanted).topology
        chip = chip_named(topology)
        policy = output.policy_values(options)
        Policy(**policy)
    except ValueError as error:
        return output.complain("rehearse", error)
    if not options.module and not os.path.isfile(options.script):
        return output.complain("rehearse", f"there is no script {options.script!r}; give the path of a Python file, or "
                                           "-m and the name of a module")
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "rows"
        request = {"topology": topology, "policy": policy, "outputs": options.outputs, "script": options.script,
                   "module": options.module, "arguments": options.arguments, "journal": str(journal)}
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        if options.devices:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={options.devices}".strip()
        code = subprocess.run([sys.executable, "-m", "jax_vmem_guard.rehearse_cli", json.dumps(request)],
                              env=environment, check=False).returncode
        rows, unfinished = _read(journal)
    if unfinished is not None:
        rows.append(Row(program=unfinished, kernel=unfinished, topology=topology, chip=chip.name, verdict=ABORTED,
                        capacity_bytes=chip.capacity_bytes,
                        reason=f"the process {how_it_ended(code)} while this program was compiled"))
    verdict = output.report(rows, options, title=f"{options.script} rehearsed for {topology}: scoped VMEM, MiB")
    if code not in (0, None) and unfinished is None:
        print(f"jax-vmem-guard rehearse: the script itself {how_it_ended(code)}", file=sys.stderr)
        return code if code > 0 else 128 - code
    return verdict


def _read(journal: Path) -> tuple[list[Row], str | None]:
    """The rows a child wrote, and the program it was at when it died."""
    rows: list[Row] = []
    unfinished = None
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        event = json.loads(line)
        if "rows" in event:
            rows += [Row.from_dict(row) for row in event["rows"]]
            unfinished = None
        else:
            unfinished = event["program"]
    return rows, unfinished


def _child(request: dict[str, Any]) -> int:
    """The script's own process."""
    from jax_vmem_guard.rehearsal import rehearse
    from jax_vmem_guard.stand_in import prepare_environment

    prepare_environment()
    arguments = request["arguments"][1:] if request["arguments"][:1] == ["--"] else request["arguments"]
    sys.argv = [request["script"], *arguments]
    with open(request["journal"], "a", buffering=1, encoding="utf-8") as journal, \
            rehearse(request["topology"], policy=Policy(**request["policy"]), outputs=request["outputs"]) as rehearsal:
        rehearsal.on_begin = lambda program: _write(journal, {"program": program})
        rehearsal.on_judged = lambda judgement: _write(journal, {"rows": [row.to_dict() for row in judgement.rows]})
        return _run_script(request["script"], request["module"])


def _write(journal: Any, event: dict[str, Any]) -> None:
    journal.write(json.dumps(event) + "\n")
    journal.flush()


def _run_script(script: str, is_module: bool) -> int:
    """Run the script as Python would; its exit code."""
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(_child(json.loads(sys.argv[1])))
