"""Structured output: constraints as llguidance grammars, and their compilation under limits. Torch-free: the gateway checks with it, the
worker's sampler enforces with it.
"""

from __future__ import annotations

from engine.constraints import Constraint


def grammar_of(constraint: Constraint, *, reasoning_end_token: int | None = None) -> str:
    """The llguidance grammar of an output that satisfies ``constraint``.

    With ``reasoning_end_token`` the output begins with free text up to and including that token. Raises RequestError, naming the limit,
    for a constraint that is no valid schema or expression, or too large.
    """
    raise NotImplementedError
