"""Understands what the TPU compiler says when VMEM does not suffice.

The forms were collected from libtpu 0.0.17 to 0.0.52 on v4 to tpu7x and from public reports back to 2019. A message
may stand anywhere in a long log, be wrapped in other exceptions, be escaped (JSON logs, `repr`), or be cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jax_vmem_guard.breakdown import Allocation, kind_of, read_table
from jax_vmem_guard.hlo_text import SIZE, Instruction, capacity_in_bytes, read_instruction, size_in_bytes

__all__ = ["Allocation", "Diagnosis", "diagnose", "find_in_log"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A compile failure understood.

    Attributes:
      form: "limit" (E1001 and its code-less twins), "capacity" ("Used X of Y vmem"), "allocation" (one allocation
        alone exceeds the memory), "pinned" (too many buffers colored into VMEM).
      instruction: name of the HLO instruction that failed, without `%`; None where the text does not say.
      is_kernel: whether it is a kernel's custom call, or a fusion around one; None where the text does not say.
      size_bytes: what the message says was needed. For "limit" a lower bound of the need; for "pinned" the buffer
        that found no place. Messages print two digits after the point, so it is exact to 5 KiB only.
      limit_bytes: the limit in the message ("limit"), else None.
      capacity_bytes: the chip's VMEM in the message ("capacity", "allocation"), else None.
      op_name: JAX's op_name metadata: "jit(f)/pallas_call".
      source: "file:line".
      breakdown: itemised allocations, largest first, as the compiler lists them.
      text: the part of the message that was understood.
      label: the text inside `kernel_metadata={...}`: the `metadata` of the `pallas_call`, as the compiler prints it.
      pinned_buffers: for "pinned", what found no place: "x.1", or "operand 0 of kernel.1".
    """

    form: str
    instruction: str | None
    is_kernel: bool | None
    size_bytes: int | None
    limit_bytes: int | None
    capacity_bytes: int | None
    op_name: str | None
    source: str | None
    breakdown: tuple[Allocation, ...]
    text: str
    label: str | None = None
    pinned_buffers: tuple[str, ...] = ()


# One alternative per way a message can begin. "vmem" must be the whole word: there is hbm, smem, sflag, tile_spmem.
_HEAD = re.compile(
    r"(?P<code>E1001: CompileTimeScopedVmemOom|CompileTimeScopedVmemOom)"
    r"|(?P<vmem>Ran out of memory in memory space vmem\b(?![\-/]))"
    r"|(?P<scoped>Scoped allocation with size )"
    r"|(?P<allocation>Allocation \(size=\d+\) would exceed memory)"
    r"|(?P<pinned>Too many buffers are colored in the alternate memory"
    r"|The value defined at [\w.\-]+ requires allocation in the alternate memory)"
)
_ON_STACK = re.compile(r"Ran out of memory in memory space vmem while allocating on stack for\s+")
_SCOPED = re.compile(
    rf"Scoped allocation with size ({SIZE})(?=\s)(?: and limit ({SIZE})(?=\s))?(?: exceeded scoped vmem limit by {SIZE})?"
)
_USED = re.compile(rf"Used ({SIZE})(?=\s)(?: of ({SIZE}) vmem)?")
_ALLOCATION = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
_TAG = re.compile(r"tag = '([^'\n]{0,2000})'(?=[\],]|\s*$)")
_OWNER = re.compile(r"\] :: ([\w.\-]+)")
_COLORED_OPERAND = re.compile(r"for colored (operand|output|result)[^:\n]{0,200}? of instruction ([\w.\-]+)"
                              r"(?: at operand index (\d+))?(?=\W|$)")
_UNPLACED_VALUE = re.compile(r"The value defined at ([\w.\-]+) requires allocation")
_COLORED_BUFFER = re.compile(r"<\d+ ([\w.\-]+)[^>]*>")
_COLORED_SIZE = re.compile(r"\bsize: (\d+)(?=\D)")
_PROTO_DUMP = re.compile(r" ?\[type\.googleapis\.com/[^\n]*?(?:'\]|(?=\n)|$)")
# Marks of an escaped message. A label is free text and often has escapes in it, so quotes count only where none of
# these attributes has plain ones.
_ESCAPED_NEWLINE = re.compile(r"VmemOom:\\+n|vmem capacity by [\d.]+\w?\.\\+n")
_ESCAPED_QUOTE = re.compile(r'(?:op_name|custom_call_target)=\\+"')
_PLAIN_QUOTE = re.compile(r'(?:op_name|custom_call_target)="')
_MESSAGE_END = "for more details."
#: More than any of the one-line forms has; what is longer is no message.
_LONGEST_LINE = 20_000


def diagnose(error: BaseException | str) -> Diagnosis | None:
    """What a compile failure means, or None where it is not about VMEM.

    Args:
      error: an exception of any type, of which the causes, contexts and group members are read as well; or text that
        holds the message somewhere.
    """
    texts = (error,) if isinstance(error, str) else _texts_of(error)
    return next((best for text in texts if (best := _best(_diagnoses(text))) is not None), None)


def find_in_log(text: str) -> list[Diagnosis]:
    """Every distinct VMEM message of a log, in order of appearance; one that is printed twice counts once."""
    found: dict[tuple, Diagnosis] = {}
    for diagnosis in _diagnoses(text):
        found.setdefault(_identity(diagnosis), diagnosis)
    substantial = [d for d in found.values() if _says_something(d)]
    return substantial or list(found.values())


def _best(diagnoses: Iterator[Diagnosis]) -> Diagnosis | None:
    """The first that has a number or a name; a bare mention of the failure only where there is nothing else."""
    bare = None
    for diagnosis in diagnoses:
        if _says_something(diagnosis):
            return diagnosis
        bare = bare or diagnosis
    return bare


def _says_something(diagnosis: Diagnosis) -> bool:
    return diagnosis.size_bytes is not None or diagnosis.instruction is not None or bool(diagnosis.pinned_buffers)


def _identity(d: Diagnosis) -> tuple:
    return (d.form, d.instruction, d.size_bytes, d.limit_bytes, d.capacity_bytes, d.op_name, d.label, d.breakdown,
            d.pinned_buffers)


def _texts_of(error: BaseException) -> Iterator[str]:
    """The texts of an exception, its group members, its cause and its context, nearest first, each exception once."""
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        try:
            yield str(current)
        except Exception:  # a broken __str__ must not hide the failure it wraps
            yield " ".join(arg for arg in current.args if isinstance(arg, str))
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting += [e for e in (*members, current.__cause__, current.__context__) if e is not None]


def _diagnoses(text: str) -> Iterator[Diagnosis]:
    """The messages of `text`, one after the other."""
    text = _PROTO_DUMP.sub("", text)
    heads = _message_starts(text)
    for position, head in enumerate(heads):
        following = heads[position + 1].start() if position + 1 < len(heads) else len(text)
        piece = _unescaped(text[head.start():following])
        if head["allocation"]:
            diagnosis = _read_allocation(piece)
        elif head["pinned"]:
            diagnosis = _read_pinned(piece)
        else:
            diagnosis = _read_out_of_memory(piece, coded=bool(head["code"]))
        if diagnosis is not None:
            yield diagnosis


def _unescaped(piece: str) -> str:
    """`piece` with real newlines and quotes, if it comes out of a JSON log or a `repr`."""
    quotes = _ESCAPED_QUOTE.search(piece) and not _PLAIN_QUOTE.search(piece)
    if quotes or _ESCAPED_NEWLINE.search(piece):
        piece = re.sub(r"\\+n", "\n", piece)
    return re.sub(r'\\+"', '"', piece) if quotes else piece


def _message_starts(text: str) -> list[re.Match]:
    """Where messages begin. The parts of one E1001 (code, sentence, sizes) are heads too: they join the first."""
    starts: list[re.Match] = []
    stage = 0
    for head in _HEAD.finditer(text):
        part = {"code": 1, "vmem": 2, "scoped": 3}.get(head.lastgroup or "", 0)
        if not part or part <= stage or not stage:
            starts.append(head)
        stage = part
    return starts


def _read_out_of_memory(text: str, *, coded: bool) -> Diagnosis | None:
    """E1001 and its twins ("limit"), or "Used X of Y vmem" ("capacity").

    A bare "Ran out of memory in memory space vmem" says neither; it is taken for the far more frequent "limit".
    """
    on_stack, scoped, used = _ON_STACK.search(text), _SCOPED.search(text), _USED.search(text)
    if not on_stack and not scoped and not coded and (used or "vmem capacity" in text[:200]):
        return _read_capacity(text, used)
    if text.startswith("Scoped allocation") and not (scoped and scoped[2] and "vmem" in scoped[0] + text[:150]):
        return None
    instruction_end = scoped.start() if scoped else len(text)
    said = text[on_stack.end():instruction_end] if on_stack else ""
    if not scoped:
        said = said.split("\n\n")[0]
    instruction = read_instruction(said)
    end = scoped.end() if scoped else (on_stack.end() + len(said) if on_stack else len(text.split("\n\n")[0]))
    tail = text.find(_MESSAGE_END, end, end + 250)
    return _diagnosis(
        "limit",
        instruction,
        size_bytes=size_in_bytes(scoped[1]) if scoped else None,
        limit_bytes=size_in_bytes(scoped[2]) if scoped and scoped[2] else None,
        text=text[:end if tail < 0 else tail + len(_MESSAGE_END)],
    )


def _read_capacity(text: str, used: re.Match | None) -> Diagnosis:
    breakdown, owner = read_table(text)
    last_row = text.rfind("==========")
    end = last_row + 10 if breakdown and last_row > 0 else len(text.split("\n\n")[0])
    return _diagnosis(
        "capacity",
        owner,
        size_bytes=size_in_bytes(used[1]) if used else None,
        capacity_bytes=capacity_in_bytes(used[2]) if used and used[2] else None,
        breakdown=breakdown,
        text=text[:end].rstrip("= \n"),
    )


def _read_allocation(text: str) -> Diagnosis | None:
    """One allocation larger than the memory: of VMEM only where it says `space=vmem`."""
    text = text[:_LONGEST_LINE].split("\n", 1)[0]
    numbers = _ALLOCATION.match(text)
    if not numbers or not re.search(r"space=vmem(?=\W)", text):
        return None
    tag, owner = _TAG.search(text), _OWNER.search(text)
    words = tag[1] if tag else ""
    kind = kind_of(words)
    instruction = Instruction(
        name=owner[1] if owner else None,
        # Only kernels have windows and scratch operands.
        is_kernel=True if kind in ("input window", "output window", "scratch") else None,
    )
    row = Allocation(size_bytes=int(numbers[1]), tag=words, instruction=instruction.name, kind=kind)
    return _diagnosis("allocation", instruction, size_bytes=int(numbers[1]), capacity_bytes=int(numbers[2]),
                      breakdown=(row,), text=text.rstrip())


def _read_pinned(text: str) -> Diagnosis:
    text = text[:_LONGEST_LINE].split("\n", 1)[0].rstrip()
    operand = _COLORED_OPERAND.search(text)
    size = _COLORED_SIZE.search(text)
    unplaced = _UNPLACED_VALUE.match(text)
    if unplaced:  # a result; it may be a copy that XLA made of the pinned value, so no instruction is to blame
        buffers: tuple[str, ...] = (unplaced[1],)
    elif operand:
        where = f"{operand[1]} {operand[3]}" if operand[3] else operand[1]
        buffers = (f"{where} of {operand[2]}",)
    else:
        buffers = tuple(dict.fromkeys(_COLORED_BUFFER.findall(text)))
    rows = tuple(Allocation(size_bytes=int(size[1]), tag="colored buffer", instruction=name, kind="pinned")
                 for name in buffers[:1] if size and not operand)
    return _diagnosis("pinned", Instruction(name=operand[2] if operand else None),
                      size_bytes=int(size[1]) if size else None, breakdown=rows, pinned_buffers=buffers, text=text)


def _diagnosis(form: str, instruction: Instruction, *, size_bytes: int | None, text: str,
               limit_bytes: int | None = None, capacity_bytes: int | None = None,
               breakdown: tuple[Allocation, ...] = (), pinned_buffers: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(form=form, instruction=instruction.name, is_kernel=instruction.is_kernel, size_bytes=size_bytes,
                     limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, op_name=instruction.op_name,
                     source=instruction.source, breakdown=breakdown, text=text, label=instruction.label,
                     pinned_buffers=pinned_buffers)
