"""The table of primitives: what is in no table refuses.

Three kinds. `RULES`: the result can be had in parts (one function per primitive, in the `rules_*` files). `WHOLE`: pure
functions of whole values only. Memory and control flow are dealt with by `memory` and `proof`. Purity is never guessed
from declared effects: `prng_random_bits` declares none.
"""

from __future__ import annotations

from jax_vmem_guard.splitting import rules_dot, rules_elementwise, rules_reduce, rules_shape
from jax_vmem_guard.splitting.ways import Question, Rule, Way

RULES: dict[str, Rule] = {**rules_elementwise.RULES, **rules_shape.RULES, **rules_reduce.RULES, **rules_dot.RULES}

WHOLE = frozenset({"gather", "multiple_of", "optimization_barrier", "top_k"})

GRID = frozenset({"program_id", "num_programs"})


def known(name: str) -> bool:
    """Whether the primitive is a pure function this table knows."""
    return name in RULES or name in WHOLE or name in GRID


def answer(question: Question) -> Way:
    """The way to have a part of a result.

    Raises:
      Refused: the primitive has no rule for this part.
    """
    rule = RULES.get(question.eqn.primitive.name)
    if rule is None:
        raise question.refuse("has no rule for a part of its result")
    return rule(question)
