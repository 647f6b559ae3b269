"""The layouts in which the gate and up matrices of a block are kept."""

GATED_LAYOUTS = (
    "packed",
    "packed_transposed",
    "separate",
    "list",
    "list_packed",
    "list_transposed",
    "turns",
    "turns_transposed",
)
