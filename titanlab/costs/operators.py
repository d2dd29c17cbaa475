"""Names of the operators that titanlab registers with torch, in the form in which torch prints them."""

from __future__ import annotations

CONTEXT_ATTENTION = "titanlab.context_attention.default"
"""Attention of a context-parallel rank."""
GROUPED_PRODUCT = "titanlab.grouped_product.default"
"""The products of all experts of a rank."""
EXCHANGE = "titanlab.exchange.default"
"""The exchange of rows between the ranks of expert parallelism."""
