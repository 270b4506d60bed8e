"""Random Pallas kernels for the property test of block splitting: small, int32 throughout, so every result is exact.

A kernel is a nested tuple that hypothesis can draw, print and shrink. The generator aims at what a split can get wrong:
scratch that is initialised late or carried, outputs that accumulate, order of steps, masks by global row numbers,
arrays that end inside a block, arrays shared by input and output, nested conditions and loops, chunked loops. Reads of
buffers nobody ever wrote are avoided: what they give is undefined, with or without a split.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

COLUMNS = 4
SCRATCH = ("s0", "s1")
BLOCKS = ("x", "x2", "x", "by_inner", "whole", *SCRATCH, "out")


@dataclass(frozen=True)
class Kernel:
    """`grid`: ((axis name, steps), ...); "a" is the axis of the rows. `rows`: of the arrays, maybe not whole blocks.
    `init`: per scratch, when it is initialised: "start" (first step of all), "inner" (first step of the axes inside
    a), "always". `target`: the output's block: "rows" or "still" (the same block in every step of a)."""

    grid: tuple
    block: int
    rows: int
    alias: bool
    init: tuple
    target: str
    body: tuple

    def axis(self, name):
        return [n for n, _ in self.grid].index(name)

    def steps(self, name):
        return dict(self.grid).get(name, 1)


leaves = st.one_of(
    st.sampled_from(BLOCKS).map(lambda r: ("load", r)), st.sampled_from(["x", "x2", "s0"]).map(lambda r: ("load", r)),
    st.sampled_from([("iota", 0), ("iota", 1), ("row",), ("in_array",), ("loop",)]),
    st.sampled_from("oai").map(lambda a: ("pid", a)), st.integers(-3, 3).map(lambda n: ("const", n)),
    st.sampled_from([("programs", "a"), ("corner", "whole"), ("corner", "whole"), ("corner", "x"), ("count",)]))

UNARY = ("neg", "row_sum", "row_max", "cumsum1", "roll1", "rev1", "halves1", "split_rows", "split_columns", "turned",
         "tile", "row_argmax", "concat1")
BLOCKWIDE = ("column_sum", "block_max", "cumsum0", "roll0", "rev0", "halves0", "first_row", "mixed")


def expressions():
    unary = st.sampled_from([*UNARY * 6, *BLOCKWIDE])  # most splits of a block-wide operation are refused
    binary = st.sampled_from(["add", "sub", "mul", "max", "where", "attend", "inner"])
    return st.recursive(leaves, lambda inner: st.one_of(
        st.tuples(unary, inner), st.tuples(binary, inner, inner)), max_leaves=5)


conditions = st.one_of(
    st.tuples(st.sampled_from(["first", "last", "odd"]), st.sampled_from("oaii")),
    st.just(("count odd",)), st.just(("inner first",)), st.tuples(st.just("corner odd"), st.sampled_from(["x", "whole"])))

stores = st.one_of(
    st.tuples(st.just("store"), st.sampled_from([*SCRATCH, "out", "out"]), expressions()),
    st.tuples(st.just("add"), st.sampled_from([*SCRATCH, "out"]), expressions()),
    st.tuples(st.just("halves"), st.sampled_from([*SCRATCH, "out"]), expressions(), st.sampled_from([0, 1])),
    st.tuples(st.just("chunks"), st.sampled_from([*SCRATCH, "out"]), st.sampled_from(["x", "x2", "s0", "whole"]),
              st.sampled_from([1, 2])),
    st.just(("count up",)))

statements = st.recursive(stores, lambda inner: st.one_of(
    st.tuples(st.just("when"), conditions, st.lists(inner, min_size=1, max_size=2).map(tuple)),
    st.tuples(st.just("repeat"), st.integers(1, 3), st.lists(inner, min_size=1, max_size=2).map(tuple)),
    st.tuples(st.just("repeat by id"), st.sampled_from("ai"), st.lists(inner, min_size=1, max_size=2).map(tuple)),
    st.tuples(st.just("carry"), st.sampled_from([*SCRATCH, "out"]), st.integers(1, 3), expressions(), expressions()),
    st.tuples(st.just("scoped"), st.sampled_from([*SCRATCH, "out"]), expressions()),
    st.tuples(st.just("choose"), st.sampled_from([*SCRATCH, "out"]), conditions, expressions(), expressions())),
    max_leaves=4)


@st.composite
def kernels(draw):
    names = draw(st.sampled_from(["a", "oa", "ai", "ai", "oai", "ia"]))
    grid = tuple((n, draw(st.sampled_from([1, 2, 2, 3, 3] if n == "a" else [1, 2, 2]))) for n in names)
    block = draw(st.sampled_from([4, 6, 8]))
    steps = dict(grid)["a"]
    missing = draw(st.sampled_from([0, 0, 1, 2, 3]))
    body = tuple(draw(st.lists(statements, min_size=1, max_size=3)))
    return Kernel(grid=grid, block=block, rows=steps * block - missing, alias=draw(st.booleans()),
                  init=tuple(draw(st.sampled_from(["start", "inner", "inner", "inner", "always"])) for _ in SCRATCH),
                  target=draw(st.sampled_from(["rows", "rows", "rows", "rows", "rows", "still"])),
                  body=(*body, ("store" if draw(st.booleans()) else "add", "out", draw(expressions()))))


def function(spec):
    """(function of four arrays, their shapes)."""
    block = spec.block
    inner = spec.steps("i")
    axes = [n for n, _ in spec.grid]
    a = axes.index("a")

    def rows_map(*ids):
        return ids[a], 0

    def inner_map(*ids):
        return ids[a], ids[axes.index("i")] if "i" in axes else 0

    def still_map(*ids):
        return 0, 0

    shape = (spec.rows, COLUMNS)
    spec_rows = pl.BlockSpec((block, COLUMNS), rows_map)
    in_specs = [spec_rows, spec_rows, pl.BlockSpec((block, COLUMNS), still_map), pl.BlockSpec((block, COLUMNS), inner_map)]
    still = spec.target == "still"
    out_spec = pl.BlockSpec((block, COLUMNS), still_map) if still else spec_rows
    out_shape = (block, COLUMNS) if still else shape
    alias = {0: 0} if spec.alias and not still else {}
    call = pl.pallas_call(
        lambda *refs: _Trace(spec, refs).run(), grid=tuple(n for _, n in spec.grid), in_specs=in_specs,
        out_specs=out_spec, out_shape=jax.ShapeDtypeStruct(out_shape, jnp.int32), input_output_aliases=alias,
        scratch_shapes=[pltpu.VMEM((block, COLUMNS), jnp.int32)] * 2 + [pltpu.SMEM((1,), jnp.int32)])
    return call, (shape, shape, (block, COLUMNS), (spec.rows, COLUMNS * inner))


class _Trace:
    """Runs a spec as a kernel body."""

    def __init__(self, spec, refs):
        self.spec = spec
        self.refs = dict(zip(("x", "x2", "whole", "by_inner", "out", "s0", "s1", "count"), refs, strict=True))
        self.ids = {n: pl.program_id(i) for i, (n, _) in enumerate(spec.grid)}
        self.programs = {n: pl.num_programs(i) for i, (n, _) in enumerate(spec.grid)}
        self.loop = jnp.int32(0)

    def run(self):
        for name, when in zip(SCRATCH, self.spec.init, strict=True):
            self.at(when, lambda ref=self.refs[name]: self.fill(ref))
        self.at("start", self.zero_count)
        out_starts = "inner" if self.spec.target == "rows" else "start"
        self.at(out_starts, lambda: self.fill(self.refs["out"]))
        self.statements(self.spec.body)

    def zero_count(self):
        self.refs["count"][0] = jnp.int32(0)

    def fill(self, ref):
        ref[...] = jnp.full(ref.shape, 2, jnp.int32)

    def at(self, when, action):
        names = [n for n, _ in self.spec.grid]
        chosen = names if when == "start" else names[names.index("a") + 1:] if when == "inner" else []
        if not chosen:
            action()
            return
        condition = self.ids[chosen[0]] == 0
        for name in chosen[1:]:
            condition = jnp.logical_and(condition, self.ids[name] == 0)
        pl.when(condition)(action)

    def condition(self, c):
        if c[0] == "count odd":
            return self.refs["count"][0] % 2 == 1
        if c[0] == "corner odd":
            return self.refs[c[1]][0, 0] % 2 == 1
        if c[0] == "inner first":
            return self.ids.get("i", jnp.int32(0)) == 0
        index = self.ids.get(c[1], jnp.int32(0))
        if c[0] == "first":
            return index == 0
        if c[0] == "last":
            return index == self.programs.get(c[1], 1) - 1
        return index % 2 == 1

    def statements(self, body):
        for statement in body:
            getattr(self, "do_" + statement[0].replace(" ", "_"))(*statement[1:])

    def do_store(self, ref, e):
        self.refs[ref][...] = self.value(e)

    def do_add(self, ref, e):
        self.refs[ref][...] += self.value(e)

    def do_halves(self, ref, e, dim):
        half = (self.spec.block if dim == 0 else COLUMNS) // 2
        value = self.value(e)
        for part in (slice(0, half), slice(half, None)):
            index = (part, slice(None)) if dim == 0 else (slice(None), part)
            self.refs[ref][index] = value[index]

    def do_chunks(self, ref, source, size):
        def chunk(i, _):
            at = pl.ds(pl.multiple_of(i * size, size), size)
            self.refs[ref][at, :] = self.refs[source][at, :] * 2 + i

        lax.fori_loop(0, self.spec.block // size, chunk, None)

    def do_count_up(self):
        self.refs["count"][0] += 1

    def do_when(self, c, body):
        pl.when(self.condition(c))(lambda: self.statements(body))

    def do_repeat(self, n, body):
        lax.fori_loop(0, n, lambda i, _: self.in_loop(i, body), None)

    def do_repeat_by_id(self, axis, body):
        lax.fori_loop(0, self.ids.get(axis, jnp.int32(1)) + 1, lambda i, _: self.in_loop(i, body), None)

    def in_loop(self, i, body):
        outer, self.loop = self.loop, i
        self.statements(body)
        self.loop = outer

    def do_carry(self, ref, n, start, step):
        def one(i, carry):
            outer, self.loop = self.loop, i
            total, sums = carry
            total = total + self.value(step) * (i + 1)
            self.loop = outer
            return total, sums + jnp.sum(total, axis=1, keepdims=True)

        total, sums = lax.fori_loop(0, n, one, (self.value(start), jnp.zeros((self.spec.block, 1), jnp.int32)))
        self.refs[ref][...] = total + sums

    def do_scoped(self, ref, e):
        def body(temp):
            temp[...] = self.value(e)
            self.refs[ref][...] = temp[...] * 3

        pl.run_scoped(body, pltpu.VMEM((self.spec.block, COLUMNS), jnp.int32))

    def do_choose(self, ref, c, yes, no):
        self.refs[ref][...] = lax.cond(self.condition(c), lambda: self.value(yes), lambda: self.value(no))

    # -- expressions: every value is (block, COLUMNS)

    def whole(self, scalar):
        return jnp.full((self.spec.block, COLUMNS), scalar, jnp.int32)

    def value(self, e):
        shape = (self.spec.block, COLUMNS)
        op, *args = e
        if op == "load":
            return self.refs[args[0]][...]
        if op == "iota":
            return lax.broadcasted_iota(jnp.int32, shape, args[0])
        if op == "row":
            return self.ids["a"] * self.spec.block + lax.broadcasted_iota(jnp.int32, shape, 0)
        if op == "in_array":
            return (self.value(("row",)) < self.spec.rows).astype(jnp.int32)
        if op == "loop":
            return self.whole(self.loop)
        if op == "pid":
            return self.whole(self.ids.get(args[0], jnp.int32(0)))
        if op == "programs":
            return self.whole(self.programs[args[0]])
        if op == "const":
            return self.whole(args[0])
        if op == "corner":
            return self.whole(self.refs[args[0]][0, 0])
        if op == "count":
            return self.whole(self.refs["count"][0])
        return getattr(self, "op_" + op)(*(self.value(arg) for arg in args))

    def op_neg(self, v):
        return -v

    def op_row_sum(self, v):
        return v + jnp.sum(v, axis=1, keepdims=True)

    def op_row_max(self, v):
        return jnp.broadcast_to(jnp.max(v, axis=1)[:, None], v.shape)

    def op_row_argmax(self, v):
        return v + jnp.argmax(v, axis=1).astype(jnp.int32)[:, None]

    def op_cumsum1(self, v):
        return jnp.cumsum(v, axis=1)

    def op_roll1(self, v):
        return pltpu.roll(v, 1, 1)

    def op_rev1(self, v):
        return lax.rev(v, (1,))

    def op_halves1(self, v):
        return jnp.concatenate([v[:, COLUMNS // 2:], v[:, :COLUMNS // 2]], axis=1)

    def op_concat1(self, v):
        return jnp.concatenate([v[:, 1:], v[:, :1] * 2], axis=1)

    def op_split_rows(self, v):
        return jnp.sum(v.reshape(v.shape[0] // 2, 2, COLUMNS), axis=2, keepdims=True).reshape(-1, 1) + v

    def op_split_columns(self, v):
        return (v.reshape(-1, 2, COLUMNS // 2) * 2).reshape(v.shape)

    def op_turned(self, v):
        return (v.T * lax.broadcasted_iota(jnp.int32, v.T.shape, 0)).T

    def op_tile(self, v):
        return jnp.tile(jnp.sum(self.refs["whole"][:2, :], axis=0, keepdims=True), (v.shape[0], 1)) + v

    def op_column_sum(self, v):
        return v + jnp.sum(v, axis=0, keepdims=True)

    def op_block_max(self, v):
        return v + jnp.max(v)

    def op_cumsum0(self, v):
        return jnp.cumsum(v, axis=0)

    def op_roll0(self, v):
        return pltpu.roll(v, 1, 0)

    def op_rev0(self, v):
        return lax.rev(v, (0,))

    def op_halves0(self, v):
        half = v.shape[0] // 2
        return jnp.concatenate([v[half:], v[:half]], axis=0)

    def op_first_row(self, v):
        return v + v[:1]

    def op_mixed(self, v):
        return v.reshape(COLUMNS, -1).T.reshape(v.shape)

    def op_add(self, v, w):
        return v + w

    def op_sub(self, v, w):
        return v - w

    def op_mul(self, v, w):
        return v * w

    def op_max(self, v, w):
        return jnp.maximum(v, w)

    def op_where(self, v, w):
        return jnp.where(v > w, v, w * 2)

    def op_attend(self, v, w):
        scores = lax.dot_general(v, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return lax.dot_general(scores, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)

    def op_inner(self, v, w):
        return v + jnp.sum(v * w, axis=1, keepdims=True)
