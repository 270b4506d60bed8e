"""Primitives that make, move and cut arrays.

| primitive | a part of the result along d is |
|---|---|
| broadcast_in_dim | the part of the operand's dimension that becomes d; the whole operand where d is new or was size 1 |
| iota | along another dimension: a smaller iota; along d: a smaller iota plus sub-step times part size, in int32 |
| reshape | the part along the operand's dimension that starts at the same place of the row-major order |
| squeeze, expand_dims, transpose | the part along the dimension d comes from |
| concatenate, rev | the part of every operand, where d is another dimension |
| stack, unstack | the part of every operand along the dimension d comes from, where d is another dimension |
| tile, repeat | the whole operand, fewer times, where d is repeated k*n times; the part where d is repeated once |
| pad, slice, dynamic_slice, dynamic_update_slice | the part, where all of d is kept and nothing is added |
| split | the part, where d is another dimension |
| roll | the part, where d is neither the rolled dimension nor the one the stride follows |
| bitcast (Pallas) | the part, where d is not the dimension whose size the bitcast changes |
"""

from __future__ import annotations

import math

from jax_vmem_guard.splitting.ways import Question, Rule, Way, shrunk, way


def broadcast_in_dim(question: Question) -> Way:
    if len(question.eqn.invars) != 1:
        raise question.refuse("has a dynamic shape")
    dims = tuple(question.params["broadcast_dimensions"])
    label = None
    if question.dim in dims:
        source = dims.index(question.dim)
        if question.operand(0)[source] == question.shape[question.dim]:
            label = source
    return way(question, [label], shape=shrunk(question.shape, question.dim, question.parts))


def iota(question: Question) -> Way:
    if question.eqn.invars:
        raise question.refuse("has a dynamic shape")
    along = question.params["dimension"] == question.dim
    changed = {**question.params, "shape": shrunk(question.shape, question.dim, question.parts)}
    return Way(labels=(), params=changed, offset_dim=question.dim if along else None)


def reshape(question: Question) -> Way:
    if len(question.eqn.invars) != 1 or question.params.get("dimensions") is not None:
        raise question.refuse("has a dynamic shape or a dimension order")
    source, target = question.operand(0), question.shape
    before = math.prod(target[:question.dim])
    candidates = [d for d in range(len(source)) if math.prod(source[:d]) == before and source[d] % question.parts == 0]
    if not candidates:
        raise question.refuse(f"from {source} to {target} mixes the split dimension with others")
    return way(question, [candidates[-1]], new_sizes=shrunk(target, question.dim, question.parts))


def squeeze(question: Question) -> Way:
    gone = {d % len(question.operand(0)) for d in question.params["dimensions"]}
    kept = [d for d in range(len(question.operand(0))) if d not in gone]
    return way(question, [kept[question.dim]])


def expand_dims(question: Question) -> Way:
    new = {d % len(question.shape) for d in question.params["dimensions"]}
    kept = [d for d in range(len(question.shape)) if d not in new]
    return way(question, [kept.index(question.dim)])


def transpose(question: Question) -> Way:
    return way(question, [question.params["permutation"][question.dim]])


def _other_dimension(question: Question, dim: int) -> None:
    if dim % len(question.shape) == question.dim:
        raise question.refuse("runs along the split dimension")


def concatenate(question: Question) -> Way:
    _other_dimension(question, question.params["dimension"])
    return way(question, [question.dim] * len(question.eqn.invars))


def stack(question: Question) -> Way:
    """Operands side by side along a new dimension."""
    axis = question.params["axis"] % len(question.shape)
    _other_dimension(question, axis)
    return way(question, [question.dim - (question.dim > axis)] * len(question.eqn.invars))


def unstack(question: Question) -> Way:
    """What `stack` put together: the dimension is gone from the results."""
    axis = question.params["axis"] % len(question.operand(0))
    return way(question, [question.dim + (question.dim >= axis)])


def split(question: Question) -> Way:
    _other_dimension(question, question.params["axis"])
    return way(question, [question.dim])


def rev(question: Question) -> Way:
    for dim in question.params["dimensions"]:
        _other_dimension(question, dim)
    return way(question, [question.dim])


def tile(question: Question) -> Way:
    reps = tuple(question.params["reps"])
    if len(reps) != len(question.operand(0)):
        raise question.refuse("adds dimensions")
    if reps[question.dim] == 1:
        return way(question, [question.dim])
    if reps[question.dim] % question.parts:
        raise question.refuse(f"repeats the split dimension {reps[question.dim]} times, not a multiple of "
                              f"{question.parts}")
    return way(question, [None], reps=shrunk(reps, question.dim, question.parts))


def repeat(question: Question) -> Way:
    """`pltpu.repeat` of jax < 0.10: the operand one after the other, as `tile` does it."""
    if question.params["axis"] % len(question.shape) != question.dim:
        return way(question, [question.dim])
    if question.params["repeats"] % question.parts:
        raise question.refuse("repeats the split dimension a number of times that the parts do not divide")
    return way(question, [None], repeats=question.params["repeats"] // question.parts)


def pad(question: Question) -> Way:
    if tuple(question.params["padding_config"][question.dim]) != (0, 0, 0):
        raise question.refuse("pads the split dimension")
    return way(question, [question.dim, None])


def slice_(question: Question) -> Way:
    dim, full = question.dim, question.operand(0)[question.dim]
    strides = question.params["strides"]
    if question.params["start_indices"][dim] or question.params["limit_indices"][dim] != full \
            or (strides is not None and strides[dim] != 1):
        raise question.refuse("takes a part of the split dimension")
    return way(question, [dim], limit_indices=shrunk(tuple(question.params["limit_indices"]), dim, question.parts))


def dynamic_slice(question: Question) -> Way:
    if question.params["slice_sizes"][question.dim] != question.operand(0)[question.dim]:
        raise question.refuse("takes a part of the split dimension")
    labels = [question.dim, *[None] * (len(question.eqn.invars) - 1)]
    return way(question, labels,
               slice_sizes=shrunk(tuple(question.params["slice_sizes"]), question.dim, question.parts))


def dynamic_update_slice(question: Question) -> Way:
    if question.operand(1)[question.dim] != question.shape[question.dim]:
        raise question.refuse("updates a part of the split dimension")
    return way(question, [question.dim, question.dim, *[None] * (len(question.eqn.invars) - 2)])


def roll(question: Question) -> Way:
    _other_dimension(question, question.params["axis"])
    if question.params.get("stride") is not None:
        _other_dimension(question, question.params["stride_axis"])
    return way(question, [question.dim, None])


def bitcast(question: Question) -> Way:
    if question.dim == len(question.shape) - 2 and question.operand(0) != question.shape:
        raise question.refuse("changes the size of the split dimension")
    return way(question, [question.dim])


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim, "iota": iota, "reshape": reshape, "squeeze": squeeze,
    "expand_dims": expand_dims, "transpose": transpose, "concatenate": concatenate, "stack": stack, "unstack": unstack,
    "split": split, "rev": rev, "tile": tile, "repeat": repeat, "pad": pad, "slice": slice_,
    "dynamic_slice": dynamic_slice, "dynamic_update_slice": dynamic_update_slice, "roll": roll, "bitcast": bitcast,
}
