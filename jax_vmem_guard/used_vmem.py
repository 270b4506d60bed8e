"""What each instruction of a compiled program really used of scoped VMEM, as the compiler wrote it down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard.custom_call import labels_in
from jax_vmem_guard.hlo_proto import instructions_in

TARGET = "tpu_custom_call"
_VMEM = "1"
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class InstructionVmem:
    """One HLO instruction of a compiled program.

    Attributes:
      name: HLO name without `%`.
      opcode: "custom-call", "fusion", ...
      is_kernel: it is a TPU kernel, or a fusion that holds one.
      used_bytes: scoped VMEM it uses.
      limit_bytes: the limit written at the instruction; None where it follows the default.
      op_name: where it comes from in the traced program; "" if unknown.
      kernel: HLO name of the custom call, where the instruction is a fusion around it; else its own name for a kernel.
      source: "file:line" it comes from; None where the program does not say.
      operands, results: shapes of a custom call's operands and results; () where the program does not say.
      label: the guard's label of the kernel (`custom_call.label`), where it has one.
      config: its backend config.
    """

    name: str
    opcode: str
    is_kernel: bool
    used_bytes: int
    limit_bytes: int | None
    op_name: str = ""
    kernel: str | None = None
    label: str | None = None
    source: str | None = None
    operands: tuple[tuple[int, ...], ...] = ()
    results: tuple[tuple[int, ...], ...] = ()
    config: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)


def used_scoped_vmem(compiled: Any) -> tuple[InstructionVmem, ...]:
    """Every kernel, and every other instruction that uses scoped VMEM, of a compiled program.

    Reads the HLO text; where the compiler cannot print it (gmm on v6e and tpu7x), the serialised executable.

    Args:
      compiled: what `jax.stages.Lowered.compile()` gives, JAX's own executable (`MeshExecutable`), or the runtime's.

    Raises:
      ValueError: where neither form of the program can be had.
    """
    try:
        return read_hlo_text(_hlo_text(compiled))
    except Exception as no_text:  # whatever the runtime raises when it cannot print: its type differs by version
        runtime = _runtime_executable(compiled)
        try:
            return _from_serialized(runtime.serialize())
        except Exception as error:
            raise ValueError(
                f"the compiled program shows neither its HLO text ({no_text}) nor its serialised form ({error})"
            ) from error


def read_hlo_text(text: str) -> tuple[InstructionVmem, ...]:
    """The same from the text of an optimised HLO module. Instructions may span lines."""
    kernels_of_computations = _kernels_of_computations(text)
    frames = _stack_frames(text)
    result = []
    for name, rest in _segments(text):
        head, _, config = rest.partition(", backend_config=")
        opcode = _OPCODE.search(" " + rest)
        inside, labelled = next(
            (kernels_of_computations[c] for c in _CALLS.findall(head) if c in kernels_of_computations), (None, head))
        row = _row(
            name=name, opcode=opcode.group(1) if opcode else "", target=_quoted(head, "custom_call_target"),
            op_name=_quoted(head, "op_name"), config=_json(config), inside=inside,
            source=_source(head, frames), arrays=_arrays(rest, head), labelled=labelled)
        if row is not None:
            result.append(row)
    return tuple(result)


def _from_serialized(serialized: bytes) -> tuple[InstructionVmem, ...]:
    rows = []
    for found in instructions_in(serialized):
        row = _row(name=found.name, opcode=found.opcode, target=found.target, op_name=found.op_name,
                   config=_json(found.config), inside=found.inside, source=found.source,
                   arrays=(found.operands, found.results), labelled=found.frontend)
        if row is not None:
            rows.append(row)
    if not rows:
        raise ValueError("no HLO instruction with a memory configuration in the serialised executable")
    return tuple(rows)


def _row(*, name: str, opcode: str, target: str, op_name: str, config: dict[str, Any], inside: str | None,
         source: str | None, arrays: tuple[Shapes, Shapes], labelled: str) -> InstructionVmem | None:
    """A record for an instruction that matters, None for one that does not. `labelled` is the text to find a label in."""
    used = _size(config, "used_scoped_memory_configs")
    own_kernel = target == TARGET
    is_kernel = own_kernel or (opcode == "fusion" and inside is not None)
    if not used and not (own_kernel and "used_scoped_memory_configs" in config):
        return None
    return InstructionVmem(
        name=name, opcode=opcode, is_kernel=is_kernel, used_bytes=used or 0,
        limit_bytes=_size(config, "scoped_memory_configs"), op_name=op_name,
        kernel=name if own_kernel else inside if is_kernel else None, source=source,
        operands=arrays[0] if own_kernel else (), results=arrays[1] if own_kernel else (),
        label=next(iter(labels_in(labelled)), None) if is_kernel else None,
        config=config,
    )


def _size(config: dict[str, Any], key: str) -> int | None:
    for entry in config.get(key) or ():
        if str(entry.get("memory_space")) == _VMEM:
            return int(entry.get("size", 0))
    return None


# ---- HLO text

_START = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", re.MULTILINE)
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$", re.MULTILINE)


def _segments(text: str) -> Iterator[tuple[str, str]]:
    starts = list(_START.finditer(text))
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        yield match.group(1), text[match.end():following.start() if following else len(text)]


def _quoted(text: str, attribute: str) -> str:
    found = re.search(attribute + r'="((?:[^"\\]|\\.)*)"', text)
    return found.group(1) if found else ""


_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")


def _arrays(rest: str, head: str) -> tuple[Shapes, Shapes]:
    """Shapes of the operands and results of a custom call."""
    constraints = re.search(r"operand_layout_constraints=\{(.*?\})\}", head, re.DOTALL)
    opcode = _OPCODE.search(" " + rest)
    if constraints is None or opcode is None:
        return (), ()
    return _shapes(constraints.group(1)), _shapes(rest[:opcode.start()])


def _shapes(text: str) -> Shapes:
    return tuple(tuple(int(d) for d in dimensions.split(",") if d) for dimensions in _SHAPE.findall(text))


def _source(head: str, frames: dict[str, str]) -> str | None:
    """ "file:line" of an instruction: written at it (jax 0.8.1), or by number of a stack frame (0.9.0 on)."""
    file = _quoted(head, "source_file")
    line = re.search(r"\bsource_line=(\d+)", head)
    if file and line:
        return f"{file}:{line.group(1)}"
    frame = re.search(r"\bstack_frame_id=(\d+)", head)
    return frames.get(frame.group(1)) if frame else None


def _stack_frames(text: str) -> dict[str, str]:
    """Number of a stack frame -> "file:line", from the tables at the head of a module."""
    head = text[:text.find("\n%") if "\n%" in text else text.find("\nENTRY")]
    files = dict(re.findall(r'^(\d+) "((?:[^"\\]|\\.)*)"$', head.partition("FunctionNames")[0], re.MULTILINE))
    places = {
        number: f"{files.get(file, '')}:{line}"
        for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", head, re.MULTILINE)
    }
    return {
        number: places[place]
        for number, place in re.findall(r"^(\d+) \{file_location_id=(\d+)", head, re.MULTILINE) if place in places
    }


def _kernels_of_computations(text: str) -> dict[str, tuple[str, str]]:
    """Computation name -> name and text of the TPU custom call in it (the last one, if there are several)."""
    kernels: dict[str, tuple[str, str]] = {}
    if TARGET not in text:
        return kernels
    headers = [(m.start(), m.group(1)) for m in _COMPUTATION.finditer(text)]
    position = 0
    starts = list(_START.finditer(text))
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        while position + 1 < len(headers) and headers[position + 1][0] < match.start():
            position += 1
        end = following.start() if following else len(text)
        if headers and f'custom_call_target="{TARGET}"' in text[match.end():end]:
            kernels[headers[position][1]] = match.group(1), text[match.end():end]
    return kernels


def _json(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        return {}
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# ---- executables


def _hlo_text(compiled: Any) -> str:
    if hasattr(compiled, "as_text"):
        text = compiled.as_text()
        if isinstance(text, str):
            return text
    return "\n".join(module.to_string() for module in _runtime_executable(compiled).hlo_modules())


def _runtime_executable(compiled: Any) -> Any:
    """The runtime's own executable under JAX's wrappers (seen in jax 0.8.1 to 0.12.0)."""
    if hasattr(compiled, "runtime_executable"):
        compiled = compiled.runtime_executable()
    return getattr(compiled, "xla_executable", compiled)
