"""Lists of JAX's primitives by what they do: the only ones that say so."""

from __future__ import annotations

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
    max min mul ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor zeta
    """.split()  # noqa: SIM905, a table
)
"""Each value of the result is computed from the operands' values at the same place."""

UNCHANGED = frozenset(
    """
    bitcast_convert_type layout_constraint mesh_cast name pcast pvary reshard
    sharding_constraint
    """.split()  # noqa: SIM905
)
"""The result is the operand, placed, named or read in another way."""

RANDOM = frozenset(
    """
    random_bits random_clone random_fold_in random_gamma random_gamma_grad random_seed
    threefry2x32
    """.split()  # noqa: SIM905
)
"""Random numbers are drawn for each key by itself."""

LINEAR = frozenset(
    """
    add add_any sub neg mul div convert_element_type copy copy_p select_n
    reduce_precision sharding_constraint name stop_gradient
    """.split()  # noqa: SIM905
)
"""Elementwise, and linear in one operand where the others are given numbers."""

RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "copy"))
"""The result has the operand's values in the same order in memory."""

MOVES = frozenset(
    ("broadcast_in_dim", "transpose", "rev", "pad", "slice", "dynamic_slice")
)
"""The result has values of the operand at other places."""

JOINS = frozenset(("concatenate", "dynamic_update_slice"))
"""The result has values of several operands."""

CALLS = frozenset(
    """
    call checkpoint closed_call composite core_call custom_dce_call custom_jvp_call
    custom_partitioning custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
    eval_jaxpr jit named_call pjit remat remat2 shard_map
    """.split()  # noqa: SIM905
)
"""The operation runs one program on its operands, `shard_map` on this device's part."""
