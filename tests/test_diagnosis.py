"""What the compiler says about VMEM is understood, whatever version, chip and wrapping it comes in."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_vmem_guard.diagnosis import diagnose, find_in_log

MESSAGES = json.loads((pathlib.Path(__file__).parent / "data" / "compiler_messages.json").read_text())
IDS = [f"{m['jax']}-{m['chip'].split(':')[0]}-{m['case']}" for m in MESSAGES]
KiB, MiB = 1 << 10, 1 << 20

# Typed in from the programs that were compiled and from what the messages print, by (chip, libtpu era). "old" is JAX
# 0.6.2, "mid" 0.8.1 and 0.9.0, "new" 0.10.2 and 0.12. A capacity is the chip's, a limit the one of the compile.
OVER_LIMIT = {  # needed, bound (MiB)
    ("v4", "new"): (48, 16), ("v5e", "new"): (48, 16), ("v5p", "new"): (48, 16), ("v6e", "new"): (48, 32),
    ("tpu7x", "new"): (48, 32), ("v5e", "old"): (24, 16), ("v5e", "mid"): (48, 16),
}
OVER_CAPACITY = {
    ("v4", "new"): (64, 16), ("v5e", "new"): (192, 128), ("v5p", "new"): (192, 63.9375), ("v6e", "new"): (192, 127.9375),
    ("tpu7x", "new"): (192, 63.9375), ("v5e", "old"): (143.84, 128), ("v5e", "mid"): (239.83, 128),
}
ONE_BUFFER = {
    ("v4", "new"): (128, 16), ("v5e", "new"): (384, 128), ("v5p", "new"): (128, 64), ("v6e", "new"): (384, 127.9375),
    ("tpu7x", "new"): (128, 64), ("v5e", "old"): (287.84, 128), ("v5e", "mid"): (479.83, 128),
}
TEMPORARIES = {
    ("v4", "new"): (34.14, 16), ("v5e", "new"): (33.05, 16), ("v5p", "new"): (33.04, 16), ("v6e", "new"): (33.73, 32),
    ("tpu7x", "new"): (32.15, 32), ("v5e", "old"): (35.13, 16), ("v5e", "mid"): (35.13, 16),
}
NUMBERS = {"over_limit": OVER_LIMIT, "over_capacity": OVER_CAPACITY, "one_buffer_over_capacity": ONE_BUFFER,
           "temporaries": TEMPORARIES}
# v4 has no room above its limit, so what is a limit elsewhere is its capacity; one allocation larger than the whole
# memory gets the "would exceed memory" form on the chips of 16 and 64 MiB.
FORMS = {"over_limit": "limit", "over_capacity": "capacity", "one_buffer_over_capacity": "capacity",
         "temporaries": "limit"}
FORMS_BY_CHIP = {("v4", "over_limit"): "capacity", ("v4", "temporaries"): "capacity",
                 ("v4", "over_capacity"): "allocation", ("v4", "one_buffer_over_capacity"): "allocation",
                 ("v5p", "one_buffer_over_capacity"): "allocation",
                 ("tpu7x", "one_buffer_over_capacity"): "allocation"}


def era(message):
    return {"0.6.2": "old", "0.8.1": "mid", "0.9.0": "mid"}.get(message["jax"], "new")


def chip_of(message):
    return message["chip"].split(":")[0]


def close(bytes_, mib):
    return abs(bytes_ - mib * MiB) <= 0.005 * MiB


def of_case(*cases):
    chosen = [m for m in MESSAGES if m["case"] in cases]
    return pytest.mark.parametrize("message", chosen, ids=[IDS[MESSAGES.index(m)] for m in chosen])


@of_case("over_limit", "over_capacity", "one_buffer_over_capacity", "temporaries")
def test_a_kernel_that_does_not_fit_is_named_with_need_and_bound(message):
    """The kernel's instruction, what it needs and what there is are read from every version and chip."""
    found = diagnose(message["message"])
    chip, case = chip_of(message), message["case"]
    form = FORMS_BY_CHIP.get((chip, case), FORMS[case])
    kernel = "main" if era(message) == "old" else "scores_kernel" if case == "temporaries" else "add_kernel"
    need, bound = NUMBERS[case][chip, era(message)]
    assert (found.form, found.instruction, found.is_kernel) == (form, f"{kernel}.1", True)
    assert close(found.size_bytes, need)
    if form == "limit":
        assert (found.limit_bytes, found.capacity_bytes) == (bound * MiB, None)
    else:
        assert (found.limit_bytes, found.capacity_bytes) == (None, bound * MiB)


@of_case("over_limit", "over_capacity", "one_buffer_over_capacity", "temporaries")
def test_op_name_and_source_are_given_where_the_text_has_them(message):
    """JAX 0.6.2 and 0.8.1 put file and line into the message, later versions only a frame number."""
    found = diagnose(message["message"])
    kernel = "scores_kernel" if message["case"] == "temporaries" else "add_kernel"
    line = {"add_kernel": 12, "scores_kernel": 19}[kernel]
    if found.form == "allocation":
        assert (found.op_name, found.source) == (None, None)
    else:
        inner = "jit(main)" if era(message) == "old" else kernel
        assert found.op_name == f"jit(<lambda>)/{inner}/pallas_call"
        assert found.source == (f"msgs.py:{line}" if message["jax"] in ("0.6.2", "0.8.1") else None)


@of_case("over_capacity", "one_buffer_over_capacity")
def test_the_itemised_table_is_read_row_by_row(message):
    """Three windows of equal size, and in older compilers the spill slots, each with its kind and owner."""
    found = diagnose(message["message"])
    window = {"over_capacity": 64, "one_buffer_over_capacity": 128}[message["case"]] * MiB
    if found.form == "allocation":
        kinds = ["input window"]
    elif era(message) == "old":  # this compiler gives windows no tag, and half the buffers
        kinds, window = ["spill slots", "other", "other", "other"], window // 2
    else:
        kinds = ["input window", "input window", "output window"]
        kinds += ["spill slots"] if era(message) == "mid" else []
    assert [row.kind for row in found.breakdown] == kinds
    assert all(row.size_bytes == window for row in found.breakdown if row.kind != "spill slots")
    owner = "main.1" if era(message) == "old" else "add_kernel.1"
    assert all(row.instruction == owner for row in found.breakdown if row.kind != "spill slots")
    if found.form == "capacity":
        assert close(sum(row.size_bytes for row in found.breakdown), found.size_bytes / MiB)


@of_case("fusion_non_kernel", "copy_non_kernel")
def test_an_instruction_that_is_no_kernel_is_told_apart(message):
    """A fusion and a copy of XLA's own are no kernels; older compilers name the copy before the fusion."""
    found = diagnose(message["message"])
    is_fusion = message["case"] == "fusion_non_kernel" and era(message) == "new"
    needed = {"v5p": 192 * KiB}.get(chip_of(message), 128 * KiB) if is_fusion else 512 * KiB
    limit = 64 * KiB if message["case"] == "fusion_non_kernel" else 256 * KiB
    assert (found.form, found.is_kernel) == ("limit", False)
    assert found.instruction == ("fusion" if is_fusion else "copy")
    assert (found.size_bytes, found.limit_bytes) == (needed, limit)


@of_case("too_many_colored")
def test_too_many_pinned_buffers_are_named(message):
    """The buffer that found no place is named; it is an operand, so it is not the failing instruction."""
    found = diagnose(message["message"])
    if chip_of(message) == "v4":  # this chip knows no coloring at all: nothing ran out
        assert found is None
    elif era(message) == "new":
        name = "x.1" if message["jax"] == "0.10.2" else "x.2"
        assert (found.form, found.instruction, found.pinned_buffers) == ("pinned", None, (name,))
        assert found.size_bytes == 128 * MiB
    else:
        kernel = "main.1" if era(message) == "old" else "add_kernel.1"
        assert (found.form, found.instruction) == ("pinned", kernel)
        assert found.pinned_buffers == (f"operand 0 of {kernel}",)


def test_a_pinned_value_that_finds_no_place_is_named():
    """libtpu 0.0.34 to 0.0.52 have a second message: for a result, or for a copy XLA made of a pinned value."""
    found = diagnose("jaxlib._jax.XlaRuntimeError: FAILED_PRECONDITION: The value defined at copy.6 requires allocation "
                     "in the alternate memory, which could not be satisfied. This typically happens because more pinned "
                     "buffers are live than the alternate memory capacity.")
    assert (found.form, found.instruction, found.pinned_buffers) == ("pinned", None, ("copy.6",))
    assert found.size_bytes is None


@of_case("hbm", "smem", "misaligned")
def test_failures_of_other_memories_are_not_ours(message):
    """HBM, SMEM and block alignment are other problems."""
    assert diagnose(message["message"]) is None


E1001 = next(m["message"] for m in MESSAGES if m["jax"] == "0.10.2" and m["case"] == "over_limit" and "E1001" in
             m["message"])
TABLE = next(m["message"] for m in MESSAGES if m["jax"] == "0.10.2" and m["case"] == "over_capacity" and "Used" in
             m["message"])

LOOK_ALIKES = {
    "runtime HBM": "RESOURCE_EXHAUSTED: Error loading program: Attempting to allocate 36.25M. That was not possible. "
                   "There are 32.00M free.; (0x0x0_HBM0)",
    "hbm table": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
                 "Used 29.95G of 15.48G hbm. Exceeded hbm capacity by 14.47G.",
    "sflag": "RESOURCE_EXHAUSTED: Ran out of memory in memory space sflag while allocating on stack for "
             "%k.1 = f32[8]{0} custom-call(%x), custom_call_target=\"tpu_custom_call\".",
    "smem on stack": "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem while allocating on stack for %k.1 = "
                     "f32[8]{0} custom-call(%x). Scoped allocation with size 2.00M and limit 1.00M exceeded scoped smem"
                     " limit by 1.00M.",
    "smem allocation": "RESOURCE_EXHAUSTED: Allocation (size=2400256) would exceed memory (size=1048576) :: #allocation5"
                       " [shape = 'u8[2400256]{0}', space=smem, size = 0x24a000, scoped, tag = 'prefetched SMEM operand"
                       " 0 next to vmem'] :: k.1",
    "SparseCore": "E3000 CompileTimeSparseCoreAllocationFailure: current allocation offset upper bound (600000) exceeds "
                  "the legitimate user allocatable offset upper bound (524280) in memory space tile_spmem",
    "spmem": "RESOURCE_EXHAUSTED: Ran out of memory in memory space spmem. Used 9.00M of 8.00M spmem.",
    "clamped limit": "W0612 09:01:02.000000 77 compile.cc:41] Requested scoped vmem limit 134217728 is above what the "
                     "chip has; clamped to 67043328",
    "error log of the first of October": "E1001 10:22:33.123456   12345 loader.cc:12] could not open vmem profile",
    "Mosaic": "INTERNAL: Mosaic failed to compile TPU kernel: failed to legalize 'tpu.memref_slice' on "
              "memref<8x128xf32, #tpu.memory_space<vmem>>",
    "another exhaustion": "RESOURCE_EXHAUSTED: too many open files",
    "nothing": "",
}


@pytest.mark.parametrize("text", LOOK_ALIKES.values(), ids=LOOK_ALIKES.keys())
def test_look_alikes_give_none(text):
    """Texts that share words with the real thing."""
    assert diagnose(text) is None
    assert find_in_log(text) == []


SPLASH = '''RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %splash_fwd.7 = (f32[8,1024]{1,0:T(8,128)S(1)}, \
/*index=1*/bf16[8,8192,128]{2,1,0:T(8,128)(2,1)}) custom-call(%flash_fwd.3, %fusion.9), \
custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8]{0}, bf16[8]{0}}, \
frontend_attributes={kernel_metadata={
"block":"{\\"q\\": 2048}",
"note":"a } brace, metadata={op_name=\\"not this\\"}. Scoped allocation, and\\nmore"
}}, metadata={op_name="jit(step)/while/body/splash_fwd/pallas_call" stack_frame_id=41}. Scoped allocation with size \
20.50M and limit 16.00M exceeded scoped vmem limit by 4.50M. It should not be possible to run out of scoped vmem - \
See https://openxla.org/xla/errors/error_1001 for more details.'''


def test_metadata_with_newlines_and_braces_becomes_the_label():
    """A label of the user's own text does not disturb the rest of the message."""
    found = diagnose(SPLASH)
    assert (found.instruction, found.is_kernel) == ("splash_fwd.7", True)
    assert found.label.startswith('"block":"{\\"q\\": 2048}",\n"note"') and found.label.endswith('more"')
    assert found.op_name == "jit(step)/while/body/splash_fwd/pallas_call"
    assert (found.size_bytes, found.limit_bytes) == (int(20.5 * MiB), 16 * MiB)


def test_operands_are_never_named():
    """Operands that are kernels stand in the text before anything else that looks like one."""
    typed = SPLASH.replace("%flash_fwd.3", "bf16[8,16]{1,0:T(8,128)} %flash_fwd.3")
    for text in (SPLASH, typed):
        assert diagnose(text).instruction == "splash_fwd.7"


def test_an_operand_that_is_a_kernel_makes_no_kernel_of_a_copy():
    """What the operands are says nothing about the instruction."""
    text = ('Ran out of memory in memory space vmem while allocating on stack for %copy.2 = f32[8]{0} copy(%tpu_custom_'
            'call.1), metadata={op_name="jit(f)/transpose"}. Scoped allocation with size 20.00M and limit 16.00M '
            'exceeded scoped vmem limit by 4.00M.')
    found = diagnose(text)
    assert (found.instruction, found.is_kernel) == ("copy.2", False)


@pytest.mark.parametrize("opcode, attributes, expected", [
    ("custom-call", 'custom_call_target="tpu_custom_call"', True),
    ("custom-call", 'custom_call_target="TopK"', False),
    ("fusion", 'kind=kCustom, calls=%c, metadata={op_name="jit(f)/k/pallas_call"}', True),
    ("fusion", 'kind=kCustom, calls=%c, metadata={op_name="jit(f)/k/mpmd_map"}', True),
    ("fusion", 'kind=kCustom, calls=%c, frontend_attributes={kernel_metadata={}}', True),
    ("fusion", 'kind=kCustom, calls=%c, metadata={op_name="jit(f)/gather"}', False),
    ("fusion", 'kind=kCustom, calls=%c, metadata={op_name="jit(f)/dynamic_slice"}', None),
    ("fusion", 'kind=kLoop, calls=%c, metadata={op_name="jit(f)/pallas_call"}', False),
    ("sort", 'dimensions={0}, to_apply=%compare, metadata={op_name="jit(f)/sort"}', False),
    ("gather", 'offset_dims={1}, metadata={op_name="jit(f)/gather"}', False),
])
def test_kernels_and_fusions_around_them_are_told_from_the_rest(opcode, attributes, expected):
    """A custom fusion is a kernel only where it shows one inside."""
    text = (f"Ran out of memory in memory space vmem while allocating on stack for %i.1 = f32[8,8]{{1,0}} {opcode}(%a),"
            f" {attributes}. Scoped allocation with size 20.00M and limit 16.00M exceeded scoped vmem limit by 4.00M.")
    found = diagnose(text)
    assert (found.instruction, found.is_kernel) == ("i.1", expected)


PUBLIC = {
    "torch_xla, no status word": (
        "Ran out of memory in memory space vmem while allocating on stack for %ragged.1 = bf16[64,32,128]{2,1,0} "
        "custom-call(s32[8]{0} %p.1), custom_call_target=\"tpu_custom_call\", metadata={op_type=\"xla___op\" "
        "op_name=\"xla___op\" source_line=251 source_file=\"/w/attention.py\"}. Scoped allocation with size 37.54M and "
        "limit 16.00M exceeded scoped vmem limit by 21.54M. It should not be possible to run out of scoped vmem",
        ("limit", "ragged.1", True, "/w/attention.py:251")),
    "no percent sign, no sizes": (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for ragged_paged\n",
        ("limit", "ragged_paged", None, None)),
    "reduce-window of 2024": (
        "EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %reduce-window.1 = "
        "(u32[16,8,128]{2,1,0:T(8,128)S(1)}, u32[16,8,128]{2,1,0:T(8,128)S(1)}) reduce-window(u32[16,8,128]{2,1,0:T(8,"
        "128)S(1)} %bitcast.2, u32[]{:T(128)} %constant.2), window={size=1x1x128 pad=0_0x0_0x127_0}, to_apply=%Add. "
        "Scoped allocation with size 31.07M and limit 16.00M exceeded scoped vmem limit by 15.07M.",
        ("limit", "reduce-window.1", False, None)),
    "spill slots nobody owns": (
        "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space vmem. Used 29.95M of 16.00M vmem. Exceeded vmem capacity by 13.95M.\n\nProgram vmem requirement "
        "29.95M:\n    scoped           29.95M\n\n  Largest program allocations in vmem:\n\n  1. Size: 29.66M\n     XLA "
        "label: register allocator spill slots call depth 2\n     Allocation type: scoped\n     ==========\n\n",
        ("capacity", None, None, None)),
    "without sizes, of 2019": (
        "Compilation failure: Ran out of memory in memory space vmem. Please file a bug against XLA.",
        ("limit", None, None, None)),
    "the sizes alone": (
        "Scoped allocation with size 34.08M and limit 32.00M exceeded scoped vmem limit by 2.08M.",
        ("limit", None, None, None)),
}


@pytest.mark.parametrize("text, expected", PUBLIC.values(), ids=PUBLIC.keys())
def test_forms_of_public_reports(text, expected):
    """Shapes of messages that people posted, with names and paths changed."""
    found = diagnose(text)
    assert (found.form, found.instruction, found.is_kernel, found.source) == expected


def test_a_table_with_metadata_of_several_lines_keeps_its_rows():
    """The label of a row may span lines."""
    text = TABLE.replace("kernel_metadata={}", 'kernel_metadata={\n"a":"1. Size"\n}')
    found = diagnose(text)
    assert len(found.breakdown) == 3
    assert (found.label, found.is_kernel) == ('"a":"1. Size"', True)


def test_the_proto_dump_at_the_end_is_no_second_message():
    """The dump repeats the message in escaped form."""
    assert "type.googleapis.com" in TABLE
    assert len(find_in_log(TABLE)) == 1
    assert "googleapis" not in diagnose(TABLE).text


def test_the_message_is_found_in_the_middle_of_a_long_log():
    """Every message of a log is listed once, in order, whatever stands around it."""
    noise = "".join(f"I0612 line {i} Used 3.00M of scratch\n" for i in range(2000))
    log = noise + E1001 + "\n" + noise + TABLE + noise + E1001 + noise
    assert [d.form for d in find_in_log(log)] == ["limit", "capacity"]
    assert diagnose(log) == diagnose(E1001)


def test_lines_with_a_log_prefix_are_read():
    """Loggers put a prefix before each line of the table."""
    log = "".join(f"ERROR 06-11 13:57:14 [core.py:515] {line}\n" for line in TABLE.splitlines())
    found = diagnose(log)
    assert [row.kind for row in found.breakdown] == ["input window", "input window", "output window"]


@pytest.mark.parametrize("escape", [repr, json.dumps, lambda text: json.dumps(json.dumps(text))],
                         ids=["repr", "json", "json in json"])
@pytest.mark.parametrize("message", [E1001, TABLE], ids=["limit", "capacity"])
def test_escaped_messages_are_read(escape, message):
    """A message in a JSON log or a `repr` has its newlines and quotes escaped."""
    escaped, plain = diagnose(escape(message)), diagnose(message)
    assert (escaped.instruction, escaped.is_kernel, escaped.size_bytes, escaped.op_name) == (
        plain.instruction, plain.is_kernel, plain.size_bytes, plain.op_name)
    assert [row.kind for row in escaped.breakdown] == [row.kind for row in plain.breakdown]


def test_the_failure_is_found_behind_other_exceptions():
    """Causes, contexts and group members are read, and a cycle among them ends."""
    inner = ValueError(E1001)
    outer = RuntimeError("could not build the model")
    outer.__cause__ = inner
    inner.__context__ = outer
    grouped = ExceptionGroup("workers", [KeyError("x"), outer])
    assert diagnose(outer).instruction == diagnose(grouped).instruction == "add_kernel.1"


def test_an_exception_that_cannot_be_printed_is_read_by_its_arguments():
    """A broken `__str__` does not hide the failure."""
    class Broken(Exception):
        def __str__(self):
            raise TypeError("no text")

    assert diagnose(Broken(E1001)).instruction == "add_kernel.1"


def test_a_failure_that_is_not_about_memory_gives_none():
    """Any exception may be asked."""
    assert diagnose(KeyboardInterrupt()) is None
    assert diagnose(ValueError("shape (3,) is not (4,)")) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_cut_message_never_raises_and_never_invents(data):
    """Cut anywhere, at both ends, a message gives a part of what the whole one gives."""
    whole = data.draw(st.sampled_from([m["message"] for m in MESSAGES] + [SPLASH] + [t for t, _ in PUBLIC.values()]))
    text = whole[:data.draw(st.integers(0, len(whole)))]
    found, full = diagnose(text), diagnose(whole)
    if full is None:
        assert found is None
    elif found is not None:
        for field in ("size_bytes", "limit_bytes", "capacity_bytes", "op_name", "source", "label"):
            assert getattr(found, field) in (None, getattr(full, field)), field
        assert found.instruction is None or full.instruction.startswith(found.instruction)
        assert found.is_kernel in (None, full.is_kernel)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_message_cut_at_the_front_never_raises(data):
    """The end of a message without its beginning."""
    whole = data.draw(st.sampled_from([m["message"] for m in MESSAGES] + [SPLASH]))
    diagnose(whole[data.draw(st.integers(0, len(whole))):])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(
    ["Ran out of memory in memory space vmem", " while allocating on stack for ", "%k.1 = ", "f32[8]{0} ", "custom-call(",
     "(", ")", "{", "}", '"', "\\", "\n", "Scoped allocation with size ", "1.00M", " and limit ", "Used ", " of ",
     "Allocation (size=3) would exceed memory (size=2)", "space=vmem", "tag = '", "Too many buffers are colored in the "
     "alternate memory", "1. Size: ", "XLA label: ", "kernel_metadata={", "CompileTimeScopedVmemOom"]), max_size=25))
def test_garbled_messages_never_raise(parts):
    """Fragments in any order."""
    diagnose("".join(parts))
    find_in_log("".join(parts))
