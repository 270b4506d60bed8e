"""Reads one HLO instruction as the compiler prints it inside its error messages, also where the text is cut off."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jax_vmem_guard.chips import CHIPS, MiB

KERNEL_TARGET = "tpu_custom_call"

_UNIT = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = r"\d+(?:\.\d+)?[KMGTB]?"  # "48.00M", "128.0K", "512B"

_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_METADATA = re.compile(r"(?<!\w)metadata=\{")
_KERNEL_METADATA = re.compile(r"\bkernel_metadata=\{")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_SOURCE_LINE = re.compile(r"source_line=(\d+)(?=\D)")
# How the primitives that make kernels name their operation: `pallas_call`, and `pl.kernel`'s `mpmd_map`.
_KERNEL_OPERATION = re.compile(r"(?:^|/)(?:pallas_call|mpmd_map|tpu_custom_call)\b")
# Operations that XLA makes a custom fusion of its own of (gather on v5e and v6e, libtpu 0.0.52).
_NEVER_AROUND_A_KERNEL = re.compile(r"(?:^|/)(?:gather|scatter[\w-]*|sort|top_k|dot_general|conv_general_dilated)$")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """What an instruction's text says; None where it does not say.

    Attributes:
      name: without `%`.
      opcode: "custom-call", "fusion", "copy", ...
      is_kernel: a kernel's custom call, or a fusion that shows that it wraps one.
      op_name: JAX's op_name.
      source: "file:line".
      label: the text inside `kernel_metadata={...}`; None where empty or cut off.
    """

    name: str | None = None
    opcode: str | None = None
    is_kernel: bool | None = None
    op_name: str | None = None
    source: str | None = None
    label: str | None = None


def size_in_bytes(text: str) -> int:
    """Bytes of "48.00M", "128.0K", "512B"; the compiler's units are powers of 1024, rounded to what is printed."""
    digits = text.rstrip("KMGTB")
    return round(float(digits) * _UNIT[text[len(digits):]])


def capacity_in_bytes(text: str) -> int:
    """Bytes of a chip's VMEM: "127.94M" is rounded, so the chip table's exact number is taken where it prints so."""
    for chip in CHIPS:
        if text == f"{chip.capacity_bytes / MiB:.2f}M":
            return chip.capacity_bytes
    return size_in_bytes(text)


def matching_close(text: str, opening: int) -> int | None:
    """Position of the bracket that closes the one at `opening`, quoted strings skipped; None where it is missing."""
    pairs = {"(": ")", "{": "}"}
    close, depth, quoted, position = pairs[text[opening]], 0, False, opening
    while position < len(text):
        letter = text[position]
        if quoted and letter == "\\":
            position += 1
        elif letter == '"':
            quoted = not quoted
        elif not quoted and letter == text[opening]:
            depth += 1
        elif not quoted and letter == close:
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def read_instruction(text: str) -> Instruction:
    """Reads `%name = shape opcode(operands), attributes`, or as much of it as there is.

    Operands are stepped over as a whole: they may be kernels themselves and must not be taken for this instruction.
    """
    name = _NAME.match(text)
    if not name:
        return Instruction()
    if not (assignment := re.compile(r"\s*=\s*").match(text, name.end())):
        # "kernel.1" alone, or cut off inside the name: only a following separator tells that the name is whole.
        return Instruction(name=name[1] if name.end() < len(text) and text[name.end()] != "%" else None)
    after_shape = _after_shape(text, assignment.end())
    opcode = _OPCODE.match(text, after_shape) if after_shape is not None else None
    if not opcode:
        return Instruction(name=name[1])
    operands_end = matching_close(text, opcode.end() - 1)
    attributes = "" if operands_end is None else text[operands_end + 1:]
    return read_attributes(attributes, name=name[1], opcode=opcode[1])


def read_attributes(attributes: str, *, name: str | None, opcode: str | None) -> Instruction:
    """The attributes of an instruction: target, op_name, source, label."""
    label, attributes, labelled = _cut_label(attributes)
    metadata = _METADATA.search(attributes)
    where = attributes[metadata.end():] if metadata else attributes
    op_name = _OP_NAME.search(where)
    file, line = _SOURCE_FILE.search(where), _SOURCE_LINE.search(where)
    return Instruction(
        name=name,
        opcode=opcode,
        is_kernel=_is_kernel(opcode, attributes, op_name[1] if op_name else None, labelled),
        op_name=op_name[1] if op_name else None,
        source=f"{file[1]}:{line[1]}" if file and line else None,
        label=label,
    )


def _after_shape(text: str, start: int) -> int | None:
    """Where the shape that begins at `start` ends: a tuple's closing parenthesis, or the next space."""
    if start < len(text) and text[start] == "(":
        close = matching_close(text, start)
        return None if close is None else close + 1
    space = re.compile(r"\S+(?=\s)").match(text, start)
    return space.end() if space else None


def _cut_label(attributes: str) -> tuple[str | None, str, bool]:
    """The label, the attributes without it, and whether there is a `kernel_metadata` at all.

    The label is the user's own text: it may hold newlines, braces, and what looks like attributes.
    """
    found = _KERNEL_METADATA.search(attributes)
    if not found:
        return None, attributes, False
    close = matching_close(attributes, found.end() - 1)
    if close is None:
        return None, attributes[:found.start()], True
    return attributes[found.end():close].strip() or None, attributes[:found.start()] + attributes[close + 1:], True


def _is_kernel(opcode: str | None, attributes: str, op_name: str | None, labelled: bool) -> bool | None:
    if target := _TARGET.search(attributes):
        return target[1].startswith(KERNEL_TARGET)
    if opcode == "custom-call":
        return labelled or None
    if opcode == "fusion" and "kind=" in attributes + " ":
        if "kind=kCustom" not in attributes:
            return False
        # XLA fuses a kernel with the slices around it as kCustom, and has kCustom fusions of its own as well.
        if labelled or (op_name and _KERNEL_OPERATION.search(op_name)):
            return True
        return False if op_name and _NEVER_AROUND_A_KERNEL.search(op_name) else None
    return None if opcode in (None, "fusion") or opcode.startswith(("async-", "call")) else False
