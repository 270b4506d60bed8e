"""Every safety check is needed: with one taken out, some kernel is split that then gives wrong numbers.

Each case is a kernel that is refused, the check that refuses it, and the same kernel without the check: accepted, and
wrong. The checks of the rebuild are tried the other way round: the rebuild is broken, and only the check notices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from split_support import Refused, refusal, rows_call, run, split, traced
from test_splitting_refusals import BLOCK, COLUMNS, REFUSED, ROWS, VMEM_BLOCK, X, body, call

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import check, chunks, emit, entry, kernel, memory, proof, rules, windows
from jax_vmem_guard.splitting.ways import way


def wrong_without(check_out, monkeypatch, fun, axes, *args):
    """Refused as it is; accepted and wrong once the check is out."""
    reason = refusal(fun, args, *axes)
    check_out(monkeypatch)
    program = traced(fun, *args)
    try:
        changed = split(program, *axes)
    except Refused as refused:
        raise AssertionError(f"still refused without the check ({reason}): {refused.reason}") from None
    before, after = run(program, *args), run(changed, *args)
    assert any(not np.array_equal(b, a) for b, a in zip(before, after, strict=True)), "accepted, but right"


def initialised_at_the_start(step):
    """A kernel with a scratch block that the first step fills; then `step(x_ref, o_ref, s_ref)`."""
    def kernel(x_ref, o_ref, s_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            s_ref[...] = jnp.ones_like(s_ref)

        step(x_ref, o_ref, s_ref)

    return call(kernel, scratch=[VMEM_BLOCK])


def add_up(x_ref, o_ref, s_ref):
    o_ref[...] = s_ref[...]
    s_ref[...] += x_ref[...]


def write_half(x_ref, o_ref, s_ref):
    s_ref[:, :64] = x_ref[:, :64]
    o_ref[...] = s_ref[...]
    s_ref[:, 64:] = s_ref[:, 64:] + x_ref[:, 64:]


def write_sometimes(x_ref, o_ref, s_ref):
    @pl.when(pl.program_id(0) % 2 == 0)
    def _():
        s_ref[...] = x_ref[...]

    o_ref[...] = s_ref[...]
    s_ref[...] = s_ref[...] + 1


def write_in_loop(x_ref, o_ref, s_ref):
    def one(i, _):
        s_ref[...] = x_ref[...]

    lax.fori_loop(0, 1 - pl.program_id(0), one, None)
    o_ref[...] = s_ref[...]
    s_ref[...] = s_ref[...] + 1


def write_masked(x_ref, o_ref, s_ref):
    store = pl.store if hasattr(pl, "store") else None
    mask = lax.broadcasted_iota(jnp.int32, (BLOCK, COLUMNS), 1) < 64
    if store is not None:
        store(s_ref, (slice(None), slice(None)), x_ref[...], mask=mask)
    else:
        pltpu.store(s_ref, x_ref[...], mask=mask)
    o_ref[...] = s_ref[...]
    s_ref[...] = s_ref[...] + 1


def read_early(x_ref, o_ref, s_ref):
    o_ref[...] = s_ref[...]
    s_ref[...] = s_ref[...] * 2 + x_ref[...]


def union(self, frame, index, written):
    """Writes in either branch count."""
    bodies = frame.children[index]
    if frame.controls[index].kind == "cond":
        return frozenset.union(*(self.frame(b, written) for b in bodies))
    return self.frame(bodies[-1], written)


def full_access(acc, shape):
    return True


def unmasked_access(acc, shape):
    return all(memory.takes_all(i, e) for t in acc.transforms for i, e in zip(t.indices, t.shape, strict=True))


DEAD_ON_ENTRY = {
    "the proof as a whole": (add_up, entry, "carried", lambda *a: {}),
    "reads before the write": (read_early, entry, "carried", lambda *a: {}),
    "only whole writes count": (write_half, memory, "is_full", full_access),
    "masked writes do not count": (write_masked, memory, "is_full", unmasked_access),
    "both branches must write": (write_sometimes, entry._Run, "_control", union),
    "loops that may not run": (write_in_loop, entry._Run, "_control", union),
}


@pytest.mark.parametrize("name", DEAD_ON_ENTRY)
def test_dead_on_entry(name, monkeypatch):
    """Without this part of the dead-on-entry proof, a scratch that carries values is split."""
    step, owner, attribute, mutant = DEAD_ON_ENTRY[name]
    wrong_without(lambda m: m.setattr(owner, attribute, mutant), monkeypatch, initialised_at_the_start(step),
                  ((0, 2),), X)


def as_elementwise(question):
    return way(question, [question.dim] * len(question.eqn.invars))


ALONG = {"cumsum": "cumsum of rows", "cummax": "cummax of rows", "rev": "rows reversed", "sort": "rows sorted"}


@pytest.mark.parametrize("primitive", ALONG)
def test_rules_look_at_the_dimension(primitive, monkeypatch):
    """A rule that did not look along which dimension the primitive runs would split it."""
    fun, axes, _ = REFUSED[ALONG[primitive]]
    wrong_without(lambda m: m.setitem(rules.RULES, primitive, as_elementwise), monkeypatch, fun, axes, X)


def test_roll_looks_at_the_rolled_dimension(monkeypatch):
    """A roll along the split dimension would wrap around within each part."""
    fun, axes, _ = REFUSED["roll of rows"]
    wrong_without(lambda m: m.setitem(rules.RULES, "roll", lambda q: way(q, [q.dim, None])), monkeypatch, fun, axes, X)


def test_strided_roll_looks_at_the_stride(monkeypatch):
    """A roll whose shift grows along the split dimension would start over in each part."""
    fun, axes, _ = REFUSED["strided roll"]
    wrong_without(lambda m: m.setitem(rules.RULES, "roll", lambda q: way(q, [q.dim, None])), monkeypatch, fun, axes, X)


def test_reshape_keeps_the_order_of_elements(monkeypatch):
    """A reshape that mixes the split dimension with others has no parts."""
    fun = body(lambda v: v + jnp.swapaxes(v.reshape(2, BLOCK // 2, COLUMNS), 0, 1).reshape(v.shape))

    def careless(question):
        source, sizes = question.operand(0), list(question.shape)
        sizes[question.dim] //= question.parts
        widest = max(range(len(source)), key=lambda d: (source[d] % question.parts == 0, d == 1, source[d]))
        return way(question, [0 if len(source) == 2 else widest], new_sizes=tuple(sizes))

    wrong_without(lambda m: m.setitem(rules.RULES, "reshape", careless), monkeypatch, fun, ((0, 2),), X)


def test_a_buffer_has_one_label(monkeypatch):
    """A block needed whole and in parts: the maximum over a part is not the maximum of the block."""
    def careless(self, ref, label, why):
        if ref not in self.labels:
            self.labels[ref] = label
            for frame, index in self.pending.get(ref, ()):
                self._need_store(frame, index)

    fun, axes, _ = REFUSED["maximum of the block"]
    wrong_without(lambda m: m.setattr(proof._State, "set_label", careless), monkeypatch, fun, axes,
                  jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS))


def test_accesses_take_the_whole_dimension(monkeypatch):
    """Slices along the split dimension, taken for the whole of it, store the wrong rows."""
    def kernel_(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[:8, :] = jnp.zeros((8, COLUMNS), jnp.float32)

    def careless(index, extent):
        return jp.is_slice(index)

    def value_dim(acc, dim):
        return dim

    def out(m):
        m.setattr(memory, "takes_all", careless)
        m.setattr(memory, "value_dim", value_dim)
        m.setattr(memory, "shrink", lambda acc, t, label, parts: t if label is None else tuple(
            jp.reslice(one, label, 0, one.indices[label].size // parts, one.shape[label] // parts) for one in t))

    wrong_without(out, monkeypatch, rows_call(kernel_), ((0, 2),), X)


def chunks_that_add_up(x_ref, o_ref, s_ref):
    """Running sums over the chunks of a block, kept in a small buffer."""
    s_ref[...] = jnp.zeros_like(s_ref)

    def one(i, _):
        at = pl.ds(i * 8, 8)
        s_ref[...] += x_ref[at, :]
        o_ref[at, :] = s_ref[...]

    lax.fori_loop(0, BLOCK // 8, one, None)


def test_chunks_are_independent(monkeypatch):
    """A loop over chunks whose iterations pass something on runs over all of them or not at all."""
    fun = call(chunks_that_add_up, scratch=[pltpu.VMEM((8, COLUMNS), jnp.float32)])
    wrong_without(lambda m: m.setattr(chunks, "check", lambda *a: None), monkeypatch, fun, ((0, 2),), X)


def chunk_numbers(x_ref, o_ref):
    def one(i, _):
        o_ref[pl.ds(i * 4, 4), :] = x_ref[pl.ds(i * 4, 4), :] + i.astype(jnp.float32)

    lax.fori_loop(0, BLOCK // 4, one, None)


def test_the_rebuild_check_notices_a_counter_that_is_not_moved(monkeypatch):
    """In the part j the chunks are numbered on from where part j-1 ended."""
    def unmoved(self, body, control):
        self.sub, sub = self.sub * 0, self.sub
        out = _chunks(self, body, control)
        self.sub = sub
        return out

    _chunks = emit.Emitter._chunks
    program = traced(rows_call(chunk_numbers), X)
    monkeypatch.setattr(emit.Emitter, "_chunks", unmoved)
    with pytest.raises(Refused, match="rebuil"):
        split(program, (0, 2))
    monkeypatch.setattr(check, "same_kernel", lambda *a, **k: None)
    changed = split(program, (0, 2))
    monkeypatch.undo()
    assert not np.array_equal(run(program, X)[0], run(changed, X)[0])


def test_plain_indices_only(monkeypatch):
    """An output whose block index is computed from the axis, taken for the axis itself, lands elsewhere."""
    fun, axes, _ = REFUSED["output index shifted"]
    original = windows.block_index

    def careless(mapping, num_axes):
        return tuple(windows.BlockIndex(axis=min(i.uses), constant=None, uses=i.uses, table=False) if i.uses else i
                     for i in original(mapping, num_axes))

    def out(m):
        m.setattr(windows, "block_index", careless)
        m.setattr(check, "same_windows", lambda *a, **k: None)

    wrong_without(out, monkeypatch, fun, axes, X)


def test_input_indices_are_plain_too(monkeypatch):
    """The same for an input looked up in a table."""
    fun, axes, _ = REFUSED["input looked up in a table"]
    original = windows.block_index

    def careless(mapping, num_axes):
        return tuple(windows.BlockIndex(axis=0, constant=None, uses=frozenset([0]), table=False) if i.table else i
                     for i in original(mapping, num_axes))

    def out(m):
        m.setattr(windows, "block_index", careless)
        m.setattr(check, "same_windows", lambda *a, **k: None)

    wrong_without(out, monkeypatch, fun, axes, X)


def test_arrays_end_in_the_same_step(monkeypatch):
    """A block wholly outside its array must not be visited: it would land on the last rows."""
    fun, axes, _ = REFUSED["arrays of different lengths"]
    wrong_without(lambda m: m.setattr(windows, "fine_steps", lambda chosen, steps, parts: steps * parts), monkeypatch,
                  fun, axes, X)


# -- the rebuild: broken on purpose, and only the check notices

BROKEN = {
    "an iota without its offset": (
        emit.Emitter, "_iota", lambda self, eqn, params, dim: jp.bind(eqn, [], {**params})[0]),
    "the finer grid index for the coarse one": (
        emit.Emitter, "_equation", None),
    "a store left out": (emit.Emitter, "_access", None),
    "operands swapped": (jp, "bind", None),
    "branches swapped": (lax, "cond", None),
    "a loop one step short": (lax, "scan", None),
}
_equation, _access, _bind, _cond, _scan = (emit.Emitter._equation, emit.Emitter._access, jp.bind, lax.cond, lax.scan)


def fine_for_coarse(self, frame, index, position, label):
    eqn = frame.jaxpr.eqns[index]
    if eqn.primitive.name == "program_id":
        self.write(frame, eqn.outvars[0], label, jp.program_id(eqn.params["axis"]))
    else:
        _equation(self, frame, index, position, label)


def no_addition(self, frame, acc):
    if acc.stores and frame.role == "branch":
        return None
    return _access(self, frame, acc)


def swapped_operands(eqn, values, params):
    return _bind(eqn, values[::-1] if eqn.primitive.name == "sub" else values, params)


def swapped_branches(condition, yes, no, *operands):
    return _cond(condition, no, yes, *operands)


def short_scan(step, init, xs, length, **options):
    return _scan(step, init, xs, length=length - 1, **options)


MUTANTS = {"the finer grid index for the coarse one": fine_for_coarse, "a store left out": no_addition,
           "operands swapped": swapped_operands, "branches swapped": swapped_branches,
           "a loop one step short": short_scan}


def rich_kernel(x_ref, o_ref):
    """Uses everything the broken rebuilds break."""
    rows = pl.program_id(0) * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK, COLUMNS), 0)
    x = x_ref[...] - rows.astype(jnp.float32)
    o_ref[...] = lax.fori_loop(0, 3, lambda i, c: c * 2 + x, x)

    @pl.when(pl.program_id(0) == 1)
    def _():
        o_ref[...] = o_ref[...] + 7


@pytest.mark.parametrize("name", BROKEN)
def test_the_rebuild_check_notices(name, monkeypatch):
    """The rebuilt kernel is broken: refused with the check, accepted and wrong without it."""
    owner, attribute, mutant = BROKEN[name]
    program = traced(rows_call(rich_kernel), X)
    monkeypatch.setattr(owner, attribute, mutant or MUTANTS[name])
    with pytest.raises(Refused, match="rebuil"):
        split(program, (0, 2))
    monkeypatch.setattr(check, "same_kernel", lambda *a, **k: None)
    changed = split(program, (0, 2))
    monkeypatch.undo()
    assert not np.array_equal(run(program, X)[0], run(changed, X)[0])


def test_the_rebuild_check_notices_a_wrong_index_map(monkeypatch):
    """A block that stays whole must follow the coarse grid index, one in parts the finer."""
    def kernel_(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[0, 0]

    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    whole = pl.BlockSpec((8, COLUMNS), lambda i: (i, 0))
    program = traced(pl.pallas_call(kernel_, grid=(2,), in_specs=[spec, whole], out_specs=spec,
                                    out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)), X, X)
    original = jp.eval_jaxpr
    monkeypatch.setattr(jp, "eval_jaxpr", lambda closed, args: original(closed, [lax.rem(a + 1, 2) for a in args]))
    with pytest.raises(Refused, match="index map does not follow"):
        split(program, (0, 2))
    monkeypatch.setattr(check, "same_windows", lambda *a, **k: None)
    changed = split(program, (0, 2))
    monkeypatch.undo()
    assert not np.array_equal(run(program, X, X)[0], run(changed, X, X)[0])


def test_lost_effects_are_noticed(monkeypatch):
    """A nested write that an equation does not declare is refused: JAX would delete it as dead code."""
    def kernel_(x_ref, o_ref):
        def scoped(t_ref):
            t_ref[...] = x_ref[...] * 2
            o_ref[...] = t_ref[...]

        pl.run_scoped(scoped, VMEM_BLOCK)

    program = traced(rows_call(kernel_), X)
    original = jp.trace_kernel

    def without_effects(*args):
        jaxpr = original(*args)
        return jaxpr.replace(eqns=[e.replace(effects=set()) if e.primitive.name == "run_scoped" else e
                                   for e in jaxpr.eqns])

    monkeypatch.setattr(jp, "trace_kernel", without_effects)
    with pytest.raises(Refused, match="does not declare a write"):
        split(program, (0, 2))


def test_lost_effects_of_the_kernel_are_noticed(monkeypatch):
    """The same for the kernel as a whole."""
    program = traced(body(lambda v: v + 1), X)
    original = jp.trace_kernel
    monkeypatch.setattr(jp, "trace_kernel", lambda *args: original(*args).replace(effects=set()))
    with pytest.raises(Refused, match="declares other writes"):
        split(program, (0, 2))


def test_unknown_primitives_are_not_taken_for_pure(monkeypatch):
    """A primitive without a rule refuses. If it were taken for pure, what it does would silently go."""
    fun, axes, _ = REFUSED["printing"]
    assert "has no rule" in refusal(fun, (X,), *axes)
    monkeypatch.setattr(rules, "known", lambda name: True)
    assert "step" in str(traced(fun, X)) and "step" not in str(split(traced(fun, X), *axes))


# -- what interpret mode cannot show: the check refuses, and without it the split is accepted

HIDDEN = {
    "output resident under an outer axis": (entry, "carried", lambda *a: {}),
    "shared array, whole input": (kernel, "_aliases", lambda *a: None),
    "shared array visited again": (kernel, "_aliases", lambda *a: None),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_checks_of_memory_that_interpret_mode_does_not_model(name, monkeypatch):
    """Without the check the split is accepted. (Interpret mode reads blocks back from the array; a TPU does not.)"""
    fun, axes, _ = REFUSED[name]
    owner, attribute, mutant = HIDDEN[name]
    assert refusal(fun, (X,), *axes)
    monkeypatch.setattr(owner, attribute, mutant)
    split(traced(fun, X), *axes)
