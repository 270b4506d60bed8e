"""The planner decides without a compiler: the same kernels and needs always give the same answer."""

from dataclasses import replace

import pytest

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import KiB, MiB, chip_named
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.planner import Decision, Need, Probe, Stuck, ceiling, decide, flag_bytes, limit_in_force
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies.limit import with_margin

V4, V5E, V5P = chip_named("v4"), chip_named("v5e"), chip_named("v5p")


def kernel(limit_bytes=None):
    return Kernel(ordinal=0, fingerprint="f", name="k", source="file.py:1", core="tc", grid=(4,), windows=(), scratch=(),
                  limit_bytes=limit_bytes)


def change(remedy, size, **data):
    return Change(kernel="k", fingerprint="f", source=None, remedy=remedy, before="", after="", need_bytes=None, edit="",
                  data={"size": size, **data})


class Compiler:
    """Answers probes from a table: remedies of a variant -> need in MiB; None: it does not compile."""

    def __init__(self, needs, proposals, chip):
        self.needs, self.table, self.chip = needs, proposals, chip
        self.asked = []

    def proposals(self, remedy, kernel, need, target):
        return self.table.get(remedy, ())

    def answer(self, variant):
        self.asked.append(variant)
        need = self.needs[tuple(c.data["size"] for c in variant)]
        if need is None:
            return Need(bytes=None, fits=False, problem="it does not lower")
        return Need(bytes=int(need * MiB), fits=need * MiB <= ceiling(variant, self.chip))

    def decide(self, limit=None, policy=None, refused=frozenset()):
        needs = {}
        while True:
            step = decide(kernel(), limit_bytes=limit or self.chip.default_limit_bytes, needs=needs, refused=refused,
                          chip=self.chip, policy=policy or Policy(), proposals=self.proposals)
            if not isinstance(step, Probe):
                return step
            needs[step.variant] = self.answer(step.variant)


def remedies(step):
    return [c.remedy for c in step.changes]


def test_a_kernel_within_its_limit_stays_as_it_is():
    compiler = Compiler({(): 16}, {}, V5E)
    assert compiler.decide() == Decision(())
    assert len(compiler.asked) == 1


def test_a_limit_is_raised_to_the_need_and_not_to_the_chip():
    step = Compiler({(): 20}, {"buffering": (change("buffering", "b"),)}, V5E).decide()
    assert remedies(step) == ["limit"]
    assert 20 * MiB <= step.changes[0].data["limit_bytes"] <= 20.2 * MiB


def test_above_capacity_the_remedies_are_tried_in_the_order_of_the_policy():
    table = {"buffering": (change("buffering", "b"),), "split": (change("split", "s"),)}
    compiler = Compiler({(): 40, ("b",): 12, ("s",): 10}, table, V4)
    assert remedies(compiler.decide()) == ["buffering"]
    assert remedies(compiler.decide(policy=Policy(remedies=("limit", "split", "buffering")))) == ["split"]
    assert remedies(compiler.decide(policy=Policy(remedies=("split",)))) == ["split"]


def test_buffering_that_makes_every_step_wait_comes_after_the_others():
    table = {"buffering": (change("buffering", "b", last_resort=True),), "split": (change("split", "s"),)}
    assert remedies(Compiler({(): 40, ("b",): 12, ("s",): 10}, table, V4).decide()) == ["split"]
    assert remedies(Compiler({(): 40, ("b",): 12, ("s",): 17}, table, V4).decide()) == ["buffering"]


def test_the_first_size_of_a_remedy_that_fits_is_kept():
    table = {"split": (change("split", 2), change("split", 4), change("split", 8))}
    step = Compiler({(): 40, (2,): 21, (4,): 12, (8,): 6}, table, V4).decide()
    assert step.changes[0].data["size"] == 4 and step.changes[0].need_bytes == 12 * MiB


def test_two_remedies_go_together_where_one_is_not_enough():
    table = {"buffering": (change("buffering", "b"),), "split": (change("split", "s"),)}
    step = Compiler({(): 90, ("b",): 40, ("s",): 30, ("b", "s"): 15}, table, V4).decide()
    assert remedies(step) == ["buffering", "split"]


def test_a_split_that_cannot_suffice_alone_is_tried_only_in_company_and_last():
    short = change("split", 2, with_others=True)
    table = {"buffering": (change("buffering", "b", last_resort=True),), "split": (change("split", 4), short)}
    compiler = Compiler({(): 40, ("b",): 30, (4,): 18, ("b", 4): 17, ("b", 2): 15}, table, V4)
    assert remedies(compiler.decide()) == ["buffering", "split"]
    assert compiler.asked[-1][1] is short and (short,) not in compiler.asked


def test_without_company_a_split_that_cannot_suffice_is_not_tried():
    compiler = Compiler({(): 40}, {"split": (change("split", 2, with_others=True),)}, V4)
    assert isinstance(compiler.decide(), Stuck) and compiler.asked == [()]


def test_three_remedies_go_together_where_two_are_not_enough():
    table = {"buffering": (change("buffering", "b"),), "coloring": (change("coloring", "c"),),
             "split": (change("split", 2, with_others=True),)}
    needs = {(): 200, ("b",): 190, ("c",): 190, ("b", "c"): 180, ("b", 2): 80, ("c", 2): 70, ("b", "c", 2): 60}
    assert remedies(Compiler(needs, table, V5P).decide())[:3] == ["buffering", "coloring", "split"]


def test_a_remedy_and_a_raised_limit_go_together():
    table = {"split": (change("split", "s"),)}
    step = Compiler({(): 100, ("s",): 50}, table, V5P).decide()
    assert remedies(step) == ["split", "limit"]
    assert step.changes[1].data["limit_bytes"] >= 50 * MiB


def test_a_limit_leaves_room_for_what_is_colored():
    room = V5P.capacity_bytes - 40 * MiB
    table = {"coloring": (change("coloring", "c", room_bytes=room),)}
    step = Compiler({(): 100, ("c",): 23.9}, table, V5P).decide()
    assert remedies(step) == ["coloring", "limit"] and step.changes[1].data["limit_bytes"] <= room


def test_a_variant_that_cannot_be_built_is_passed_over():
    table = {"split": (change("split", "bad"), change("split", "good"))}
    assert Compiler({(): 40, ("bad",): None, ("good",): 12}, table, V4).decide().changes[0].data["size"] == "good"


def test_a_variant_that_failed_in_the_program_is_not_planned_again():
    first, second = change("split", 2), change("split", 4)
    compiler = Compiler({(): 40, (2,): 12, (4,): 10}, {"split": (first, second)}, V4)
    assert compiler.decide(refused=frozenset({(first,)})).changes[0].data["size"] == 4
    assert isinstance(compiler.decide(refused=frozenset({(first,), (second,)})), Stuck)


def test_what_nothing_repairs_says_the_least_need_seen():
    step = Compiler({(): 40, ("s",): 20}, {"split": (change("split", "s"),)}, V4).decide()
    assert isinstance(step, Stuck) and step.need_bytes == 20 * MiB and "v4" in step.reason


def test_deciding_is_pure():
    table = {"split": (change("split", 2), change("split", 4))}
    answers = [Compiler({(): 40, (2,): 21, (4,): 12}, table, V4).decide() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(("own", "flag", "limit"), [
    (None, None, 16 * MiB), (None, 20 * MiB, 20 * MiB), (8 * MiB, 20 * MiB, 8 * MiB), (500 * MiB, None, 128 * MiB),
    (None, 500 * MiB, 128 * MiB),
])
def test_a_kernels_own_limit_wins_over_the_flag_and_both_end_at_the_chip(own, flag, limit):
    assert limit_in_force(replace(kernel(), limit_bytes=own), chip=V5E, flag_bytes=flag) == limit


@pytest.mark.parametrize(("options", "arguments", "expected"), [
    ({}, "", None), ({"xla_tpu_scoped_vmem_limit_kib": "20480"}, "", 20 * MiB),
    ({"xla_tpu_scoped_vmem_limit_kib": 20480}, "", 20 * MiB),
    ({}, "--xla_a=1 --xla_tpu_scoped_vmem_limit_kib=1024", MiB),
    ({"xla_tpu_scoped_vmem_limit_kib": "2048"}, "--xla_tpu_scoped_vmem_limit_kib=1024", 2 * MiB),
    ({}, "--xla_tpu_scoped_vmem_limit_kib=many", None),
])
def test_the_flag_is_read_from_the_options_and_from_libtpus_arguments(options, arguments, expected):
    assert flag_bytes(options, arguments) == expected


@pytest.mark.parametrize("need", [4 * KiB, 100 * KiB, MiB, 17 * MiB + 1, 60 * MiB, 128 * MiB])
def test_the_margin_is_at_most_ten_percent_and_ends_at_the_chip(need):
    assert need <= with_margin(need, V5E) <= min(1.1 * need, V5E.capacity_bytes)
