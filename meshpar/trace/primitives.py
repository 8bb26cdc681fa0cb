"""The primitives that compute each value from the operands' values at the same place.

The one list that says so: for tokens and examples that must not meet, for layers that
an optimizer has by themselves, and for memory that a fused operation does not take.
"""

from __future__ import annotations

ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan"),
        *("atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz"),
        *("complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh"),
        *("digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2"),
        *("expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag"),
        *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2"),
        *("logistic", "lt", "lt_to", "max", "min", "mul", "ne", "neg", "nextafter"),
        *(
            "not",
            "one_minus_square",
            "or",
            "polygamma",
            "polynomial",
            "population_count",
        ),
        *("pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem"),
        *("round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
        *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"),
        *("stop_gradient", "sub", "tan", "tanh", "xor", "zeta"),
    )
)

AS_THEY_ARE = frozenset(
    (
        *("bitcast_convert_type", "layout_constraint", "mesh_cast", "name", "pcast"),
        *("pvary", "reshard", "sharding_constraint"),
    )
)
"""Those that give their operand, placed, named or read in another way."""

RANDOM = frozenset(
    (
        *("random_bits", "random_clone", "random_fold_in", "random_gamma"),
        *("random_gamma_grad", "random_seed", "threefry2x32"),
    )
)
"""Those that draw for each key by itself."""
