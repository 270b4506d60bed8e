"""Reductions, scans along a dimension, sorts.

| primitive | a part of the result along d is |
|---|---|
| reduce_*, argmax, argmin | the part along the operand's dimension that becomes d (a reduced one has no d) |
| cumsum, cumprod, cummax, cummin, cumlogsumexp | the part, where d is another dimension |
| sort | the part of every operand, where d is another dimension |
"""

from __future__ import annotations

from jax_vmem_guard.splitting.ways import Question, Rule, Way, way

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
              "argmin")
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def reduction(question: Question) -> Way:
    gone = {a % len(question.operand(0)) for a in question.params["axes"]}
    kept = [d for d in range(len(question.operand(0))) if d not in gone]
    return way(question, [kept[question.dim]])


def cumulative(question: Question) -> Way:
    if question.params["axis"] % len(question.shape) == question.dim:
        raise question.refuse("runs along the split dimension")
    return way(question, [question.dim])


def sort(question: Question) -> Way:
    if question.params["dimension"] % len(question.shape) == question.dim:
        raise question.refuse("runs along the split dimension")
    return way(question, [question.dim] * len(question.eqn.invars))


RULES: dict[str, Rule] = {**dict.fromkeys(REDUCTIONS, reduction), **dict.fromkeys(CUMULATIVE, cumulative),
                          "sort": sort}
