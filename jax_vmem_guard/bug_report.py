"""A folder to attach to an XLA issue, for failures that no kernel caused.

It holds the program (StableHLO), its HLO before and after optimisation, versions, chip, flags, the message, and a script
that shows the same failure on a machine without a TPU. It holds no argument values, and of paths only what lies inside
the project or an installed package.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.diagnosis import Diagnosis
from jax_vmem_guard.reproduction import readme, script
from jax_vmem_guard.shorten import has_path, shorten_paths

logger = logging.getLogger("jax_vmem_guard")

_PACKAGES = ("jax", "jaxlib", "libtpu")
_FLAG_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
#: Constants above this many bytes are counted in the README: weights closed over by the program are part of it.
_LARGE_CONSTANT = 1 << 10
_HLO_DUMP = re.compile(r"module_\d+\..*?\.(before_optimizations|after_optimizations(?:[-_][\w-]+)?)\.txt")
_FILE_LOCATION = re.compile(r'"(?:[^"\\]|\\.)*"(?=:\d+:\d+)')
_HLO_OPTIONS = {"xla_dump_hlo_as_text": True}


def write_bundle(folder: Path, *, module_bytecode: bytes, error: BaseException, diagnosis: Diagnosis, topology: str,
                 num_devices: int, compiler_options: dict[str, Any]) -> Path | None:
    """Write the bundle for one failure into a folder of its own under `folder`, named after its content.

    The program is compiled once more, in this process, to get the compiler's dumps: it just failed with an error that
    can be caught, and it does so again. A failure already written is not written again.

    Args:
      folder: where bundles go; made if it is not there.
      module_bytecode: the StableHLO module that failed.
      error: the compiler's error.
      diagnosis: what it means.
      topology: name of the topology to compile for: "v5e:2x2".
      num_devices: how many devices the program runs on.
      compiler_options: the options of the compile that failed.

    Returns:
      The bundle's folder; None where it could not be written (disk full, no permission), with a warning in the log. An
      exception never leaves here: the compiler's own error is what the caller must see.
    """
    try:
        return _write(Path(folder), module_bytecode, error, diagnosis, topology, num_devices, compiler_options)
    except Exception as fault:
        logger.warning("jax_vmem_guard could not write a bug report into `%s` (%s: %s); set "
                       "JAX_VMEM_GUARD_BUG_REPORT_DIR to a folder that can be written", folder, type(fault).__name__,
                       fault)
        return None


def _write(folder: Path, bytecode: bytes, error: BaseException, diagnosis: Diagnosis, topology: str, num_devices: int,
           compiler_options: dict[str, Any]) -> Path:
    module = without_paths(bytecode)
    program = _jax.text_with_locations(module)
    facts = {
        "topology": topology,
        "chip": _chip_name(topology),
        "num_devices": num_devices,
        "num_replicas": _count(module, "mhlo.num_replicas", 1),
        "num_partitions": _count(module, "mhlo.num_partitions", num_devices),
        "compiler_options": _without_path_values(compiler_options),
        "flags": {name: _flags(os.environ[name]) for name in _FLAG_VARIABLES if os.environ.get(name)},
        "versions": versions(),
    }
    message = shorten_paths(str(error), Path.cwd()) + "\n"
    bundle = folder / _name(diagnosis, program, message, facts)
    if bundle.is_dir():
        return bundle
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        (unfinished / "program.mlir").write_text(program)
        (unfinished / "message.txt").write_text(message)
        (unfinished / "environment.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
        (unfinished / "reproduce.py").write_text(script(inspect.getsource(_jax.compile_for_topology), facts))
        hlo = _write_hlo(unfinished / "hlo", program, facts)
        constants = _large_constants(module)
        (unfinished / "README.md").write_text(readme(diagnosis, facts, hlo=hlo, constants=constants))
        unfinished.chmod(0o755)
        _rename(unfinished, bundle)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return bundle


def _rename(unfinished: Path, bundle: Path) -> None:
    """Put the finished folder in place; another process or thread may have been first with the same content."""
    try:
        unfinished.rename(bundle)
    except OSError:
        if not bundle.is_dir():
            raise


def without_paths(bytecode: bytes) -> Any:
    """The module with the paths in its source locations shortened, and no locations inside its kernels."""
    text = _jax.text_with_locations(_jax.parse_stablehlo(bytecode))
    text = _FILE_LOCATION.sub(lambda found: shorten_paths(found[0], Path.cwd()), text)
    module = _jax.parse_stablehlo(text)
    for call in custom_call.custom_calls(module):
        with contextlib.suppress(ValueError):  # no configuration, or one that is no JSON: there is no kernel in it
            custom_call.write_config(call, _stripped(custom_call.read_config(call)))
    return module


def _stripped(config: dict[str, Any]) -> dict[str, Any]:
    """A custom call's configuration with a kernel that has no source locations."""
    inner = config.get("custom_call_config") or {}
    if not inner.get("body"):
        return config
    body = _jax.shipped_mosaic_without_locations(base64.b64decode(inner["body"]))
    return {**config, "custom_call_config": {**inner, "body": base64.b64encode(body).decode()}}


def versions() -> dict[str, str]:
    """Versions of Python, the operating system, and the packages the compiler comes in."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _write_hlo(folder: Path, program: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Compile again with the compiler's dumps on, and keep those of the HLO. Returns the names of the files."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as dumps:
        options = {**facts["compiler_options"], **_HLO_OPTIONS, "xla_dump_to": dumps}
        try:
            _jax.compile_for_topology(program, facts["topology"], facts["num_replicas"], facts["num_partitions"], options)
        except Exception as error:
            logger.debug("the compile for the dump fails, as it should: %s", error)
        folder.mkdir()
        for dump in sorted(Path(dumps).iterdir()):
            if found := _HLO_DUMP.fullmatch(dump.name):
                text = dump.read_text(errors="replace")
                (folder / f"{found[1]}.txt").write_text(shorten_paths(text, Path.cwd()))
    return tuple(sorted(file.name for file in folder.iterdir()))


def _name(diagnosis: Diagnosis, program: str, message: str, facts: Mapping[str, Any]) -> str:
    content = "\0".join((program, message, json.dumps(facts, sort_keys=True)))
    what = re.sub(r"[^A-Za-z0-9]+", "-", diagnosis.instruction or diagnosis.form).strip("-")[:40]
    return f"vmem-{what}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _chip_name(topology: str) -> str:
    try:
        return chip_named(topology).name
    except ValueError:
        return topology.split(":")[0]


def _count(module: Any, attribute: str, otherwise: int) -> int:
    attributes = module.operation.attributes
    return int(attributes[attribute].value) if attribute in attributes else otherwise


def _without_path_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that decide what is compiled: those that name a file or folder of this machine only decide on output."""
    return {name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in sorted(options.items()) if not has_path(f'"{value}"')}


def _flags(text: str) -> list[str]:
    return [flag for flag in text.split() if not has_path(flag.split("=", 1)[-1] + " ")]


def _large_constants(module: Any) -> tuple[int, int]:
    """How many constants of more than 1 KiB the program holds, and their bytes together."""
    ir = _jax.ir()
    sizes: list[int] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.constant":
            value = op.attributes["value"]
            if not getattr(value, "is_splat", True):
                tensor = ir.RankedTensorType(op.results[0].type)
                width = getattr(tensor.element_type, "width", 8)
                elements = 1
                for extent in tensor.shape:
                    elements *= extent
                if elements * width // 8 > _LARGE_CONSTANT:
                    sizes.append(elements * width // 8)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return len(sizes), sum(sizes)
