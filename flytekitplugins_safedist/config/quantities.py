"""What Kubernetes' quantities mean (``k8s.io/apimachinery/pkg/api/resource``, ``ParseQuantity``)."""

from __future__ import annotations

import re
from fractions import Fraction

_FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))((?:[KMGTPE]i)|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_MOST = 2**63 - 1
_DIGITS = 1000


def size_in_bytes(quantity: object) -> int | None:
    """The bytes that a quantity (``"20Gi"``, ``"1e9"``) or a number means, what is less than a byte cut off; None for
    anything else, for what is negative, and for more than Kubernetes can hold."""
    if isinstance(quantity, bool) or not isinstance(quantity, (int, str)):
        return None
    size = value_of(quantity)
    return int(size) if size is not None and 0 <= size <= _MOST else None


def value_of(quantity: object) -> Fraction | None:
    """The number that a quantity means; None where it is none."""
    # Python itself prints no number of some thousand digits.
    if not isinstance(quantity, (int, float, str)) or (isinstance(quantity, int) and abs(quantity) > _MOST):
        return None
    text = str(quantity)
    match = _FORM.fullmatch(text) if len(text) <= _DIGITS else None
    if match is None:
        return None
    number, suffix = Fraction(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * Fraction(1024 ** _BINARY.index(suffix))
    return number * Fraction(f"1e{_DECIMAL[suffix] if suffix in _DECIMAL else suffix[1:]}")
