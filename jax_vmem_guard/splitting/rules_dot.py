"""Matrix products.

| d is | lhs | rhs |
|---|---|---|
| a batch dimension | the part along it | the part along it |
| a free dimension of lhs | the part along it | whole |
| a free dimension of rhs | whole | the part along it |

A contracted dimension has no d in the result: it can never be asked for, so a product over a split dimension refuses.
"""

from __future__ import annotations

from jax_vmem_guard.splitting.ways import Question, Rule, Way, way


def dot_general(question: Question) -> Way:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = question.params["dimension_numbers"]
    if question.dim < len(lhs_batch):
        return way(question, [lhs_batch[question.dim], rhs_batch[question.dim]])
    lhs_free = [d for d in range(len(question.operand(0))) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(len(question.operand(1))) if d not in (*rhs_contract, *rhs_batch)]
    position = question.dim - len(lhs_batch)
    if position < len(lhs_free):
        return way(question, [lhs_free[position], None])
    return way(question, [None, rhs_free[position - len(lhs_free)]])


RULES: dict[str, Rule] = {"dot_general": dot_general}
