"""Amounts as the API writes them: `250m` of a processor, `512Mi` of memory."""

from __future__ import annotations

from decimal import Decimal

_FACTORS = {
    "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
}  # fmt: skip


def amount(text: str | int | float) -> Decimal:
    """The number that a quantity stands for: processors, bytes.

    Raises:
        ValueError: it is no quantity.
    """
    written = str(text)
    for suffix in sorted(_FACTORS, key=len, reverse=True):
        if written.endswith(suffix):
            return Decimal(written.removesuffix(suffix)) * _FACTORS[suffix]
    try:
        return Decimal(written)
    except ArithmeticError as fault:
        raise ValueError(f"{written!r} is no quantity") from fault
