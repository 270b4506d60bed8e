"""The words for people say what failed, by how much, whose limit it is, where the bytes go and what to do."""

import json
import pathlib
import re

import pytest

from jax_vmem_guard.chips import CHIPS, MiB, chip_named
from jax_vmem_guard.diagnosis import diagnose
from jax_vmem_guard.explain import candidates, explain, explain_log

MESSAGES = json.loads((pathlib.Path(__file__).parent / "data" / "compiler_messages.json").read_text())
OURS = [m for m in MESSAGES if m["case"] not in ("hbm", "smem", "misaligned") and "Invalid memory" not in m["message"]]


def message(case, chip="v6e", jax="0.10.2"):
    return next(m["message"] for m in MESSAGES if (m["case"], m["jax"]) == (case, jax) and m["chip"].startswith(chip))


def names(chips):
    return {chip.name for chip in chips}


@pytest.mark.parametrize("m", OURS, ids=[f"{m['jax']}-{m['chip']}-{m['case']}" for m in OURS])
def test_the_true_chip_is_among_the_candidates(m):
    """The numbers never rule out the chip that the message came from."""
    assert m["chip"].split(":")[0] in names(candidates(diagnose(m["message"])))


@pytest.mark.parametrize("case, chip, expected", [
    ("over_capacity", "v5e", {"v5e"}),
    ("over_capacity", "v6e", {"v6e"}),
    ("over_capacity", "v5p", {"v5p", "tpu7x"}),
    ("one_buffer_over_capacity", "tpu7x", {"v5p", "tpu7x"}),
    ("one_buffer_over_capacity", "v4", {"v2", "v3", "v4"}),
    ("over_limit", "v5e", {"v5e", "v5p"}),
    ("over_limit", "v6e", {"v6e", "tpu7x"}),
    ("fusion_non_kernel", "v5e", {"v5e", "v5p", "v6e", "tpu7x"}),
])
def test_the_chip_is_guessed_no_closer_than_the_numbers_allow(case, chip, expected):
    """A capacity or a default limit belongs to one chip or to several; a limit of somebody's choice to most."""
    assert names(candidates(diagnose(message(case, chip)))) == expected


def test_a_default_limit_is_told_from_the_hardware():
    """Many take 32 MiB for what the chip has."""
    words = explain(diagnose(message("over_limit")), chip_named("v6e"))
    assert "Kernel `add_kernel.1`" in words and "at least 48.00 MiB" in words and "16.00 MiB over" in words
    assert "The default limit of v6e is 32.00 MiB. It is not the hardware: the chip has 127.94 MiB." in words
    assert "lower bound" in words


def test_the_line_to_write_is_given_and_within_the_chip():
    """The first way out is a line of code whose number covers the stated need."""
    words = explain(diagnose(message("over_limit")), chip_named("v6e"))
    line = re.search(r"compiler_params=pltpu\.CompilerParams\(vmem_limit_bytes=(.*)\)", words)
    assert words.index("  1. ") < line.start() < words.index("  2. ")
    number = eval(line[1], {})
    assert 48 * MiB <= number <= 1.15 * 48 * MiB


def test_a_candidate_without_the_room_is_named():
    """62 MiB and a margin is more than tpu7x has, and v6e has it."""
    text = message("over_limit").replace("size 48.00M", "size 62.00M")
    assert "not enough room on tpu7x" in explain(diagnose(text))


def test_a_need_above_the_chip_proposes_no_limit():
    """No limit is enough where the lower bound is above the capacity."""
    text = message("over_limit", "v5p").replace("size 48.00M", "size 80.00M")
    words = explain(diagnose(text), chip_named("v5p"))
    assert "no limit is enough" in words and "vmem_limit_bytes=" not in words


def test_a_limit_that_somebody_set_is_not_called_default():
    """The kernel's own `vmem_limit_bytes` may be too low."""
    text = message("over_limit").replace("limit 32.00M", "limit 40.00M")
    words = explain(diagnose(text), chip_named("v6e"))
    assert "set by the kernel's `vmem_limit_bytes`" in words and "the default is 32.00 MiB" in words


def test_above_the_capacity_the_table_and_the_arithmetic_of_single_buffers_are_shown():
    """192 MiB in three double-buffered windows are 96 with one buffer each: enough on v6e, not on v5p."""
    fits, not_yet = explain(diagnose(message("over_capacity", "v6e"))), explain(diagnose(message("over_capacity", "v5p")))
    row = "64.00 MiB  input window 1: block bf16[4096,4096] of bf16[8192,4096], 2 buffers"
    assert row in fits and row in not_yet
    assert "leaves 96.00 MiB, which fits" in fits
    assert "leaves 96.00 MiB, which is still too much" in not_yet
    assert "vmem_limit_bytes=" not in fits


def test_spill_slots_are_explained_and_come_with_their_own_way_out():
    """On v4 nearly all of the need is spill slots."""
    words = explain(diagnose(message("temporaries", "v4")))
    assert "31.14 MiB  register spill slots" in words and "31.14 MiB are register spill slots" in words


def test_an_instruction_of_xla_is_no_kernels_fault():
    """A flag that is too low, or a bug: the way out is a compile option and a report, never a kernel's limit."""
    words = explain(diagnose(message("copy_non_kernel", "v5e", "0.8.1")), chip_named("v5e"))
    assert "`copy` (no kernel)" in words and "msgs.py:40" in words
    assert 'compiler_options={"xla_tpu_scoped_vmem_limit_kib": "576"}' in words
    assert "below the chip's default" in words and "JAX_VMEM_GUARD_BUG_REPORT_DIR" in words
    assert "vmem_limit_bytes" not in words


def test_an_instruction_of_unknown_kind_gets_both_kinds_of_advice():
    """A custom fusion may or may not have a kernel inside."""
    text = message("fusion_non_kernel").replace("kind=kOutput", "kind=kCustom").replace("/dot_general", "/dynamic_slice")
    words = explain(diagnose(text))
    assert "vmem_limit_bytes=" in words and "If it is not a kernel of yours" in words


@pytest.mark.parametrize("jax, name", [("0.10.2", "`x.1` (128.00 MiB)"), ("0.8.1", "`operand 0 of add_kernel.1`")])
def test_what_was_pinned_is_named(jax, name):
    """The way out is to unpin it."""
    words = explain(diagnose(message("too_many_colored", "v5e", jax)))
    assert name in words and "Unpin" in words


@pytest.mark.parametrize("m", OURS, ids=[f"{m['jax']}-{m['chip']}-{m['case']}" for m in OURS])
def test_the_words_are_no_failure_themselves(m):
    """A log that holds an explanation is not diagnosed by it, with every chip and cut anywhere."""
    diagnosis = diagnose(m["message"])
    for chip in (None, *CHIPS):
        assert diagnose(explain(diagnosis, chip)) is None
    assert diagnose(explain_log(m["message"])[0]) is None


@pytest.mark.parametrize("m", OURS[::3], ids=[f"{m['jax']}-{m['chip']}-{m['case']}" for m in OURS[::3]])
def test_cut_messages_are_explained_too(m):
    """What is unknown is left out or said to be unknown."""
    for end in range(40, len(m["message"]), 97):
        diagnosis = diagnose(m["message"][:end])
        if diagnosis is not None:
            words = explain(diagnosis)
            assert "None" not in words and "What to do" in words


def test_a_log_with_two_failures_explains_both():
    """Each distinct failure once, and the exit code says that something was found."""
    one, two = message("over_limit"), message("over_capacity")
    words, code = explain_log(f"noise\n{one}\nnoise\n{two}\n{one}")
    assert code == 0
    assert words.count("Failure ") == 2 and "Failure 1 of 2" in words
    assert "JAX_VMEM_GUARD=fix" in words


@pytest.mark.parametrize("case, memory", [("hbm", "HBM"), ("smem", "SMEM"), ("misaligned", None)])
def test_other_failures_are_not_explained_but_told(case, memory):
    """The exit code says that nothing was found; another memory is named where it is one."""
    words, code = explain_log(message(case))
    assert code == 1 and "No VMEM failure found" in words
    assert memory is None or memory in words
