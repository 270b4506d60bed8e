"""Elementwise primitives: every operand in the same parts as the result.

| operand | needed |
|---|---|
| of the result's shape | the same part |
| a scalar | whole |
| of the result's rank, size 1 along the split dimension | whole |
"""

from __future__ import annotations

from jax_vmem_guard.splitting.ways import Label, Question, Rule, Way, way

ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "real",
    "reciprocal", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor", "zeta", "stochastic_round", "pack_elementwise",
    "unpack_elementwise",
)


def elementwise(question: Question) -> Way:
    labels: list[Label] = []
    for i in range(len(question.eqn.invars)):
        shape = question.operand(i)
        if shape == question.shape:
            labels.append(question.dim)
        elif shape == () or (len(shape) == len(question.shape) and shape[question.dim] == 1):
            labels.append(None)
        elif len(shape) == len(question.shape) and shape[question.dim] == question.shape[question.dim]:
            labels.append(question.dim)
        else:
            raise question.refuse(f"broadcasts an operand of shape {shape} in a way no rule covers")
    return way(question, labels)


def bitcast_convert_type(question: Question) -> Way:
    if question.operand(0) != question.shape:
        raise question.refuse("changes the shape")
    return way(question, [question.dim])


RULES: dict[str, Rule] = {**dict.fromkeys(ELEMENTWISE, elementwise), "bitcast_convert_type": bitcast_convert_type}
