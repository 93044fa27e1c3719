"""Kubernetes quantities: what is one, what it means, and how the API writes it (``1024Mi`` becomes ``1Gi``).

The one place that reads them: sizes of a task's config, and what a rendered job asks for. Follows
``k8s.io/apimachinery/pkg/api/resource`` (``ParseQuantity``, ``CanonicalizeBytes``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from ..errors import RenderError

_FORM = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)((?:[KMGTPE]i)|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_POWER = {suffix: power for power, suffix in _DECIMAL.items()}
_NANO = Fraction(1, 10**9)
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
    try:
        return _parse(quantity)[0]
    except RenderError:
        return None


def canonical(quantity: object) -> str:
    """The quantity as the API server gives it back.

    Raises:
        RenderError: it is no quantity.
    """
    value, suffix = _parse(quantity)
    if suffix.endswith("i") and abs(value) >= 1024 and value.denominator == 1:
        return _binary(int(value))
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return _decimal(value, {power: f"e{power}" if power else "" for power in _DECIMAL})
    return _decimal(value, _DECIMAL)


def _parse(quantity: object) -> tuple[Fraction, str]:
    # Python itself refuses to convert numbers of some thousand digits.
    if isinstance(quantity, int) and abs(quantity) > _MOST:
        raise RenderError("this is more than Kubernetes can hold", expected=f"at most {_MOST}")
    text = str(int(quantity)) if isinstance(quantity, float) and quantity.is_integer() else str(quantity)
    found = _FORM.fullmatch(text) if len(text) <= _DIGITS else None
    if found is None:
        raise RenderError("this is not a Kubernetes quantity", seen=repr(quantity), expected="e.g. 2, 500m or 64Gi")
    sign, digits, suffix = found[1], found[2], found[3] or ""
    number = Fraction(digits if not digits.startswith(".") else f"0{digits}")
    if suffix in _BINARY[1:]:
        number *= 1024 ** _BINARY.index(suffix)
    elif suffix in _POWER:
        number *= Fraction(10) ** _POWER[suffix]
    else:
        number *= Fraction(10) ** int(suffix[1:])
    if number % _NANO:  # finer than a nano-unit is rounded away from zero
        number = (number // _NANO + 1) * _NANO
    return (-number if sign == "-" else number), suffix


def _binary(value: int) -> str:
    power = 0
    while value % 1024 == 0 and value and power < len(_BINARY) - 1:
        value //= 1024
        power += 1
    return f"{value}{_BINARY[power]}"


def _decimal(value: Fraction, suffixes: Mapping[int, str]) -> str:
    if value == 0:
        return "0"
    for power in sorted(suffixes, reverse=True):
        scaled = value / Fraction(10) ** power
        if scaled.denominator == 1:
            return f"{scaled.numerator}{suffixes[power]}"
    raise RenderError("this quantity is too precise", seen=str(value), expected="multiples of 1n")
