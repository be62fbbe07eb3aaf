"""Whether two records of a metric agree, as far as their decimals go: in a name, inside, in a log."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from ckpttool.core.text import counted
from ckpttool.runs.members.entry import Entry

_PERCENT = 100


def disagreements(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield for each metric how many checkpoints have another one inside than in the name, and the first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entry in entries:
        for name, named in entry.fields.metrics.items():
            inside = entry.recorded_metric(name)
            unit = _last_decimal(named, entry.name)
            if inside is None or any(_rounds_to(named, one, unit) for one in (inside, inside * _PERCENT)):
                continue
            counts[name] += 1
            first.setdefault(name, f"{entry.path} has {inside:.6g} inside")
    for name, count in counts.items():
        whose = f"{name} of {counted(count, 'checkpoint')}"
        yield f"{whose} is another inside than in the name, and what is inside counts: {first[name]}"


def _last_decimal(named: float, name: str) -> float:
    """Return what the last decimal in a name stands for: a whole number may have none, as ``acc_93``."""
    if not math.isfinite(named) or not named.is_integer():
        return 10.0 ** -decimals(named)
    written = re.search(rf"(?<![0-9]){abs(int(named))}\.([0-9]+)", name)
    return 1.0 if written is None else 10.0 ** -len(written[1])


def _rounds_to(named: float, inside: float, unit: float) -> bool:
    """Tell whether a number is another one as far as its decimals go."""
    if not math.isfinite(named) or not math.isfinite(inside):
        return agree(named, inside)
    return abs(named - inside) <= max(0.501 * unit, 1e-6 * abs(named))


def agree(one: float, other: float) -> bool:
    """Tell whether two numbers are the same as far as the one with fewer decimals says."""
    if not math.isfinite(one) or not math.isfinite(other):
        return one == other or (math.isnan(one) and math.isnan(other))
    unit = max(10.0 ** -decimals(one), 10.0 ** -decimals(other))
    return abs(one - other) <= max(0.501 * unit, 1e-6 * abs(one))  # rounded, or between float32 and float64


def decimals(number: float) -> int:
    """Return how many decimals a number was written with."""
    mantissa, _, exponent = repr(float(number)).partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)
