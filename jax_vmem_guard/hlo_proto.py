"""Finds HLO instructions in the bytes of a serialised TPU executable, without knowing the executable's own format.

`Compiled.as_text()` raises for some programs that compiled well (megablox' gmm on v6e and tpu7x). The serialised
executable still holds the optimised HLO module as a protocol buffer. libtpu 0.0.30 and 0.0.34 serialise to protocol
buffers one after another; 0.0.52 to Riegeli records, and there each instruction refers to a table of backend configs in
the module. Seen in those three; the field numbers are those of XLA's `hlo.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
_RIEGELI_BLOCK = 1 << 16
_RIEGELI_BLOCK_HEADER = 24
_RIEGELI_CHUNK_HEADER = 40

# HloModuleProto, HloComputationProto, HloInstructionProto
_MODULE_NAME, _MODULE_COMPUTATIONS, _MODULE_CONFIG_TABLE = 1, 3, 22
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
_NAME, _OPCODE, _METADATA, _CALL_TARGET, _CALLED_IDS, _CONFIG, _FRONTEND, _CONFIG_REFERENCE = 1, 2, 7, 28, 38, 43, 68, 99
_SHAPE, _OPERAND_SHAPES = 3, 57
_OP_NAME, _SOURCE_FILE, _SOURCE_LINE, _STACK_FRAME = 2, 3, 4, 15  # OpMetadata
_DIMENSIONS, _TUPLE_SHAPES = 3, 4  # ShapeProto
_MODULE_STACK_FRAMES = 17
_FILE_NAMES, _FILE_LOCATIONS, _FRAMES = 1, 3, 4  # StackFrameIndexProto; numbers in it count from 1
_DEEPEST = 8  # messages around the module; five were seen


@dataclass(frozen=True, kw_only=True)
class ProtoInstruction:
    """What the search keeps of one HLO instruction; `config` is its backend config, JSON as text.

    `inside` names the tpu_custom_call in a computation the instruction calls, if there is one. `frontend` is the text of
    the frontend attributes, the guard's label among them: its own, or those of the kernel inside.
    `operands` and `results` are the shapes of a custom call.
    """

    name: str
    opcode: str
    target: str
    op_name: str
    config: str
    inside: str | None
    source: str | None
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    frontend: str


def instructions_in(serialized: bytes) -> tuple[ProtoInstruction, ...]:
    """Instructions that have a backend config, of every HLO module in a serialised executable.

    Where two modules hold an instruction of the same name, the one whose config tells used memory counts.
    """
    found: dict[str, ProtoInstruction] = {}
    for record in _records(serialized):
        for module in _modules(record, 0):
            for instruction in _instructions(module):
                known = found.get(instruction.name)
                if known is None or '"used_scoped_memory_configs":[{' not in known.config:
                    found[instruction.name] = instruction
    return tuple(found.values())


def _instructions(module: dict[int, list[bytes | int]]) -> Iterator[ProtoInstruction]:
    table = [c for c in module.get(_MODULE_CONFIG_TABLE, []) if isinstance(c, bytes)]
    computations: dict[int, list[dict[int, list[bytes | int]]]] = {}
    for encoded in module[_MODULE_COMPUTATIONS]:
        computation = _parse(encoded)
        if computation is None:
            continue
        number = next((i for i in computation.get(_COMPUTATION_ID, []) if isinstance(i, int)), -1)
        parsed = [_parse(i) for i in computation.get(_COMPUTATION_INSTRUCTIONS, [])]
        computations[number] = [p for p in parsed if p is not None and _NAME in p and _OPCODE in p]
    kernels = {
        number: p for number, body in computations.items() for p in body if _text(p, _CALL_TARGET) == "tpu_custom_call"
    }
    frames = _stack_frames(module)
    for body in computations.values():
        for fields in body:
            config = _config(fields, table)
            if config:
                metadata = _parse(fields.get(_METADATA, [b""])[0]) or {}
                inside = next((kernels[c] for c in _numbers(fields, _CALLED_IDS) if c in kernels), None)
                yield ProtoInstruction(
                    name=_text(fields, _NAME),
                    opcode=_text(fields, _OPCODE),
                    target=_text(fields, _CALL_TARGET),
                    op_name=_text(metadata, _OP_NAME),
                    config=config,
                    source=_source(metadata, frames),
                    operands=_shapes(fields.get(_OPERAND_SHAPES, [])),
                    results=_result_shapes(fields),
                    inside=_text(inside, _NAME) if inside else None,
                    frontend=_text(inside or fields, _FRONTEND),
                )


def _config(fields: dict[int, list[bytes | int]], table: list[bytes]) -> str:
    own = _text(fields, _CONFIG)
    if own or _CONFIG_REFERENCE not in fields:
        return own
    reference = _parse(fields[_CONFIG_REFERENCE][0])
    for index in (reference or {}).get(2, []):
        if isinstance(index, int) and index < len(table):
            return table[index].decode("utf-8", "replace")
    return ""


def _source(metadata: dict[int, list[bytes | int]], frames: list[str]) -> str | None:
    file = _text(metadata, _SOURCE_FILE)
    if file:
        return f"{file}:{_number(metadata, _SOURCE_LINE)}"
    frame = _number(metadata, _STACK_FRAME)
    return frames[frame - 1] if 0 < frame <= len(frames) else None


def _stack_frames(module: dict[int, list[bytes | int]]) -> list[str]:
    """ "file:line" of every stack frame of a module, in the order they are numbered."""
    index = _parse(module.get(_MODULE_STACK_FRAMES, [b""])[0]) or {}
    files = [v.decode("utf-8", "replace") for v in index.get(_FILE_NAMES, []) if isinstance(v, bytes)]
    places = []
    for encoded in index.get(_FILE_LOCATIONS, []):
        place = _parse(encoded) or {}
        file = _number(place, 1)
        places.append(f"{files[file - 1] if 0 < file <= len(files) else ''}:{_number(place, 3)}")
    numbers = [_number(_parse(encoded) or {}, 1) for encoded in index.get(_FRAMES, [])]
    return [places[n - 1] if 0 < n <= len(places) else "" for n in numbers]


def _shapes(encoded: list[bytes | int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_numbers(_parse(shape) or {}, _DIMENSIONS)) for shape in encoded)


def _result_shapes(fields: dict[int, list[bytes | int]]) -> tuple[tuple[int, ...], ...]:
    result = _parse(fields.get(_SHAPE, [b""])[0]) or {}
    return _shapes(result.get(_TUPLE_SHAPES) or fields.get(_SHAPE, []))


def _modules(data: bytes, depth: int) -> Iterator[dict[int, list[bytes | int]]]:
    """Every HloModuleProto in a message, found by its shape: a name, and computations of named instructions."""
    fields = _parse(data)
    if fields is None:
        return
    if _is_module(fields):
        yield fields
        return
    if depth < _DEEPEST:
        for values in fields.values():
            for value in values:
                if isinstance(value, bytes) and len(value) > 64:
                    yield from _modules(value, depth + 1)


def _is_module(fields: dict[int, list[bytes | int]]) -> bool:
    if not _text(fields, _MODULE_NAME) or _MODULE_COMPUTATIONS not in fields:
        return False
    computation = _parse(fields[_MODULE_COMPUTATIONS][0])
    if computation is None or _COMPUTATION_INSTRUCTIONS not in computation:
        return False
    instruction = _parse(computation[_COMPUTATION_INSTRUCTIONS][0])
    return instruction is not None and bool(_text(instruction, _NAME)) and bool(_text(instruction, _OPCODE))


# ---- the encodings


def _records(data: bytes) -> Iterator[bytes]:
    """The messages in a serialised executable: records of a Riegeli file, or messages with their length before each."""
    start = data.find(_RIEGELI_SIGNATURE)
    if start < 0:
        yield from _delimited(data)
        return
    stream = b"".join(
        data[begin + _RIEGELI_BLOCK_HEADER:begin + _RIEGELI_BLOCK] for begin in range(start, len(data), _RIEGELI_BLOCK)
    )
    at = 0
    while at + _RIEGELI_CHUNK_HEADER <= len(stream):
        _, size, _, kind, _ = struct.unpack_from("<QQQQQ", stream, at)
        chunk = stream[at + _RIEGELI_CHUNK_HEADER:at + _RIEGELI_CHUNK_HEADER + size]
        at += _RIEGELI_CHUNK_HEADER + size
        if chr(kind & 0xFF) == "r" and chunk[:1] == b"\0":  # plain records, not compressed
            yield from _plain_records(chunk)


def _delimited(data: bytes) -> Iterator[bytes]:
    at = 0
    try:
        while at < len(data):
            size, at = _varint(data, at)
            yield data[at:at + size]
            at += size
    except IndexError:
        return


def _plain_records(chunk: bytes) -> Iterator[bytes]:
    try:
        length, at = _varint(chunk, 1)
        begin = end_of_sizes = at + length
        while at < end_of_sizes:
            size, at = _varint(chunk, at)
            yield chunk[begin:begin + size]
            begin += size
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise IndexError


def _parse(data: bytes | int) -> dict[int, list[bytes | int]] | None:
    """Field number -> values of a message; None for bytes that are no message."""
    if not isinstance(data, bytes):
        return None
    fields: dict[int, list[bytes | int]] = {}
    at, end = 0, len(data)
    try:
        while at < end:
            key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            value: bytes | int
            if kind == 0:
                value, at = _varint(data, at)
            elif kind == 2:
                size, at = _varint(data, at)
                value = data[at:at + size]
                at += size
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                value = data[at:at + size]
                at += size
            else:
                return None
            if number == 0 or at > end:
                return None
            fields.setdefault(number, []).append(value)
    except IndexError:
        return None
    return fields


def _text(fields: dict[int, list[bytes | int]], number: int) -> str:
    value = fields.get(number, [b""])[0]
    if not isinstance(value, bytes):
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""


def _number(fields: dict[int, list[bytes | int]], number: int) -> int:
    value = fields.get(number, [0])[0]
    return value if isinstance(value, int) else 0


def _numbers(fields: dict[int, list[bytes | int]], number: int) -> list[int]:
    """Repeated integers, packed or not."""
    numbers: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            numbers.append(one)
    return numbers
