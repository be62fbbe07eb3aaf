"""Fields of checkpoints' names: epoch, step, date, time, metrics.

Names that are equal with blanked fields are one series. So fields are blanked only if their key is known;
folds, seeds, learning rates and other parts that distinguish siblings are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from ckpttool.core import name_patterns as patterns
from ckpttool.core.name_patterns import FLAGS, SEPARATOR

LOOK_BACK = 48
"""Characters before a number in which its key is searched; this bounds the work on hostile names."""

MAX_DIGITS = 18
"""Limit on the digits of an epoch or step, so that it fits into 64 bits."""

UNNAMED = "value"
"""Name of a metric whose name is missing."""


@dataclass(frozen=True, slots=True)
class NameFields:
    """Fields of a name.

    Attributes:
        blank: The name with ``*`` for all recognised fields, which is equal for a series.
        saved_at: ISO 8601.
        number: Last number of a name without other fields, which orders the series. In names of Keras's
            ModelCheckpoint it is the epoch, too.
        is_ordinal: Whether that number may count saves: it follows a word such as ``model``, or nothing.
    """

    blank: str
    epoch: int | float | None = None
    step: int | None = None
    saved_at: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    number: int | None = None
    is_ordinal: bool = True

    @property
    def position(self) -> tuple[float | str | None, ...]:
        """Return the position in a series; those of one series are comparable."""
        return self.epoch, self.step, self.number, self.saved_at


@lru_cache(maxsize=4)  # several callers ask for the fields of the same name
def parse_name(name: str) -> NameFields:
    """Return the fields of a checkpoint's file or directory name."""
    return _NameParser(name).fields()


def pair_fields(name: str) -> NameFields | None:
    """Return epoch and step of ``checkpoint_3_1200.pt``, for callers that confirm it by the series."""
    match = patterns.PAIR.fullmatch(name)
    if match is None or parse_name(name).saved_at is not None:
        return None
    before, epoch, between, step, behind = match.groups()
    return NameFields(f"{before}*{between}*{behind}", epoch=int(epoch), step=int(step))


def is_step_name(name: str) -> bool:
    """Return whether a directory's name is that of one save: its step, perhaps with metrics."""
    return bool(patterns.STEP_DIRECTORY.fullmatch(name) or _NameParser(name).is_of_step())


def is_named_best(name: str) -> bool:
    """Return whether a name marks the best checkpoint: ``best.pth``, ``model_best_epoch_3.pt``."""
    return patterns.BEST.search(name) is not None


class _Number(NamedTuple):
    """A number in a name; its sign belongs to the span, not to the text."""

    text: str
    start: int
    end: int

    @property
    def value(self) -> int | float | None:
        if len(self.text) > MAX_DIGITS:
            return None
        if self.text.isdigit():
            return int(self.text)
        return int(float(self.text)) if self.is_whole else float(self.text)

    @property
    def is_whole(self) -> bool:
        """Whether it is a count: ``3`` and ``2e5``, not ``3.0``."""
        return self.text.isdigit() or ("." not in self.text and "-" not in self.text)


class _NameParser:
    """Parser of a name, with the fields recognised so far."""

    def __init__(self, name: str) -> None:
        suffix = patterns.SUFFIX.search(name, max(0, len(name) - LOOK_BACK))
        self.name = name
        self.end = suffix.start() if suffix and suffix.start() else len(name)
        self.spans: list[tuple[int, int]] = []
        self.ends: set[int] = set()
        self.epoch: int | float | None = None
        self.step: int | None = None
        self.saved_at: str | None = None
        self.keyed: list[tuple[int, int]] = []
        self.measured: list[tuple[str | None, float]] = []
        self.number: int | None = None
        self.is_ordinal = True
        self.decimals: list[tuple[int, int]] = []
        self.keras_epoch = self._keras_epoch()
        self.rest = list(self._numbers())

    def fields(self) -> NameFields:
        """Recognise the fields, the most certain ones first, and return them."""
        # Each pass takes numbers that it is sure of, and leaves the rest to the next: a key before the number
        # (``epoch_3``), a key after it (``3_epochs``), a letter (``e0007``), a decimal without a key. Only if
        # no field was found is the last number a position (``model_12``): in ``model_12_epoch_3``, it may
        # be a size or a version.
        for recognise in (self._take_keyed, self._take_keyed_after, self._take_lettered, self._take_decimal):
            self.rest = [number for number in self.rest if not recognise(number)]
        if self.keras_epoch is not None:
            self.number = self.epoch = int(self.keras_epoch.text)
            self._take(self.keras_epoch.start, self.keras_epoch.end)
        self._take_non_finite()
        if self.spans == self.decimals:
            self._take_last_number()
        elif (self.epoch, self.step, self.saved_at) == (None, None, None):
            self._take_last_number(beside_metrics=True)
        self._take_last_value()
        return NameFields(
            self._blank(),
            self.epoch,
            self.step,
            self.saved_at,
            self._metrics(),
            self.number,
            self.is_ordinal,
        )

    def is_of_step(self) -> bool:
        """Return whether the name without metrics is a step's: ``step=100`` of ``step=100-val_loss=0.3``.

        ``iou0.5_epoch_3`` could be one of several runs with different thresholds.
        """
        self.fields()
        rest, start = "", 0
        for begin, end in sorted(self.keyed):
            rest += self.name[start:begin].rstrip("-_,. ")
            start = end
        rest = (rest + self.name[start:]).lstrip("-_,. ")
        return bool(self.keyed) and patterns.STEP_DIRECTORY.fullmatch(rest) is not None

    def _numbers(self) -> Iterator[_Number]:
        """Yield the numbers outside of dates, which are recorded, and of shard numbers."""
        # Other digits are excluded first: of dates, of words such as ``acc1``, and of ``00001-of-00005``,
        # unless that follows a key (``step-1-of-5``). Numbers are then found between these spans only.
        spans = [
            *self._dates(),
            *(match.span() for match in patterns.IN_WORD.finditer(self.name, 0, self.end)),
        ]
        for match in patterns.SHARD.finditer(self.name, 0, self.end):
            if not self._is_keyed(self._before(match.start())):
                spans.append(match.span())
        if self.keras_epoch is not None:
            spans.append((self.keras_epoch.start, self.keras_epoch.end))
        start = 0
        for begin, end in [*sorted(spans), (self.end, self.end)]:
            for match in patterns.NUMBER.finditer(self.name, start, max(start, begin)):
                yield _Number(match[0], match.start(), match.end())
            start = max(start, end)

    def _keras_epoch(self) -> _Number | None:
        """Return the 5 of ``resnet50.05-0.87.keras``, unless a word before it is its key."""
        # ModelCheckpoint's documented pattern has no keys. A single digit counts only in Keras's files.
        match = patterns.KERAS_TAIL.search(self.name, max(0, self.end - LOOK_BACK), self.end)
        if match is None:
            return None
        before = self._before(match.end("word"))
        keyed = [patterns.EPOCH, patterns.STEP, patterns.TOTAL]
        keyed += [] if match["part"] else [patterns.SIBLING]
        if any(key.search(before) for key in keyed) or metric_key(before):
            return None
        if len(match["part"] or "") == 1 and patterns.PLAIN_WORD.search(before[:-1]):
            return None  # model_v1.05 is a version
        is_keras = patterns.KERAS_FILE.search(self.name, max(0, len(self.name) - LOOK_BACK)) is not None
        number = _Number(match["epoch"], *match.span("epoch"))
        return number if is_keras or len(number.text) > 1 else None

    def _dates(self) -> Iterator[tuple[int, int]]:
        for match in patterns.DATE.finditer(self.name, 0, self.end):
            year, _, month, day, hour, _, minute, second = match.groups()
            if self._is_keyed(self._before(match.start())):
                continue
            try:
                when = datetime(
                    int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0)
                )
            except ValueError:  # the 31st of February
                continue
            if self.saved_at is None:
                self.saved_at = when.isoformat() if hour else when.date().isoformat()
            self._take(*match.span())
            yield match.span()

    def _before(self, start: int) -> str:
        return self.name[max(0, start - LOOK_BACK) : start]

    def _is_keyed(self, before: str) -> bool:
        return bool(patterns.EPOCH.search(before) or patterns.STEP.search(before))

    def _take_keyed(self, number: _Number) -> bool:
        """Take ``epoch_3``, ``step=100``, ``val_loss=0.32``."""
        before = self._before(number.start)
        if patterns.TOTAL.search(before):
            return False
        if not number.is_whole and MEAN_OF_METRIC.search(before) and self._take_metric(number, before):
            return True
        if patterns.SAMPLES.search(before):
            return self._take(number.start, number.end)
        if patterns.EPOCH.search(before):
            return self._take_epoch(number)
        if patterns.STEP.search(before):
            return self._take_step(number)
        return self._take_metric(number, before)

    def _take_epoch(self, number: _Number) -> bool:
        self.epoch = number.value if self.epoch is None else self.epoch
        return self._take(number.start, number.end)

    def _take_step(self, number: _Number) -> bool:
        thousand = patterns.THOUSAND.match(self.name, number.end, self.end)
        self.step = _count(number, thousand) if self.step is None else self.step
        return self._take(number.start, thousand.end() if thousand else number.end)

    def _take_metric(self, number: _Number, before: str) -> bool:
        key = self._metric_key(number.start, number.end, is_decimal=not number.is_whole)
        if key is None:
            return False
        name, is_known = key
        if name and name.lower() == "precision" and number.text in patterns.BITS:
            return False
        is_negative = before.endswith(("=-", ":-", "_-"))
        value, end = self._metric_value(number)
        if value is not None:
            self.measured.append((name, -float(value) if is_negative else float(value)))
            is_behind = before.endswith(("=", "=-")) or (self.epoch, self.step) != (None, None)
            if name and is_known and is_behind and not number.is_whole:
                self.keyed.append((self.name.rindex(name, 0, number.start), end))
        return self._take(number.start - is_negative, end)

    def _metric_key(self, start: int, end: int, *, is_decimal: bool) -> tuple[str | None, bool] | None:
        """Return the key of a value between two places, from the text after the last field."""
        ends = (at for at in range(start, max(0, start - LOOK_BACK), -1) if at in self.ends)
        field_end = next(ends, None)
        return metric_key(
            self._before(start) if field_end is None else self.name[field_end:start],
            after=self.name[end : end + 1],
            follows_field=field_end is not None,
            is_decimal=is_decimal,
            is_counted=(self.epoch, self.step) != (None, None),
        )

    def _metric_value(self, number: _Number) -> tuple[int | float | None, int]:
        """Return the value of a metric and its end: ``0_25`` is 0.25, but ``1_25`` is None."""
        # ``_`` may stand for the decimal point, as in ``val_loss_0_25``. Only 0 proves that:
        # ``val_loss_1_25`` may be 1.25, or 1 and a step, so it is taken as a field without a value.
        behind = patterns.FRACTION.match(self.name, number.end, self.end) if number.is_whole else None
        if behind is None or any(start <= behind.start(1) < end for start, end in self.spans):
            return number.value, number.end
        return float(f"0.{behind[1]}") if number.text == "0" else None, behind.end()

    def _take_non_finite(self) -> None:
        """Take ``val_loss=nan``, so that the name is in the same series as its neighbours."""
        for match in patterns.NO_NUMBER.finditer(self.name, 0, self.end):
            key = self._metric_key(*match.span(1), is_decimal=True)
            if key is not None:
                self.measured.append((key[0], float(match[1])))
                self._take(*match.span(1))

    def _take_keyed_after(self, number: _Number) -> bool:
        """Take ``10_epochs`` and ``5000_steps`` if there is no better epoch or step."""
        if not number.is_whole:
            return False
        if self.epoch is None and patterns.EPOCH_AFTER.match(self.name, number.end, self.end):
            return self._take_epoch(number)
        if self.step is None and patterns.STEP_AFTER.match(self.name, number.end, self.end):
            return self._take_step(number)
        return False

    def _take_lettered(self, number: _Number) -> bool:
        """Take ``e0007`` and ``s00002500``, but not ``e1_…`` and ``s1_…``: experiments and subjects."""
        # At the start of a name, ``e`` is an epoch only if nothing else but measurements follows; ``s`` is
        # never a step there, and elsewhere only with more than three digits, or after an epoch.
        letter = patterns.LETTER.search(self._before(number.start))
        if letter is None or not number.is_whole or self.name[number.end : number.end + 1].isalpha():
            return False
        is_first = number.start == 1
        if letter[1] in "eE":
            is_all = number.end == self.end or bool(patterns.KERAS_EPOCH.fullmatch(self.name))
            is_meant = self.epoch is None and (not is_first or is_all)
            return is_meant and self._take_epoch(number)
        is_meant = self.step is None and not is_first and (len(number.text) > 3 or self.epoch is not None)
        return is_meant and self._take_step(number)

    def _take_decimal(self, number: _Number) -> bool:
        """Take a decimal after a field or another number: a metric without a name."""
        if number.is_whole or patterns.THOUSAND.match(self.name, number.end, self.end):
            return False
        before = self._before(number.start)
        if not patterns.AFTER_NUMBER.search(before) and not patterns.PLAIN_WORD.search(before):
            return False
        self.decimals.append((number.start, number.end))
        return self._take(number.start, number.end)

    def _take_last_number(self, *, beside_metrics: bool = False) -> None:
        """Take the last number that may be a position; with metrics, only one after a word like ``model``."""
        # ``checkpoint-500`` is a step of the Hugging Face Trainer. Other bare numbers are taken from the end
        # of the name. After a word like ``model``, ``k`` and ``M`` are multipliers (``model_100k``).
        trainer = patterns.TRAINER.fullmatch(self.name)
        if trainer:
            self.step = int(trainer[1])
            self.spans = [trainer.span(1)]
            return
        for number in reversed(self.rest):
            is_ordinal = bool(patterns.ORDINAL.search(self._before(number.start)))
            thousand = patterns.THOUSAND.match(self.name, number.end, self.end) if is_ordinal else None
            is_thousands = thousand is not None and thousand[1] in "kKM"  # 125m are parameters
            if (is_ordinal or not beside_metrics) and self._is_position(number, is_thousands=is_thousands):
                self.number = _count(number, thousand)
                self.is_ordinal = is_ordinal
                self._take(number.start, number.end if thousand is None else thousand.end())
                if self.is_ordinal and patterns.COUNTS_EPOCHS.search(
                    self.name, max(0, len(self.name) - LOOK_BACK)
                ):
                    self.epoch = self.number
                return

    def _take_last_value(self) -> None:
        """Take the decimal at the end as a metric if it directly follows another field."""
        before = self._before(self.end)
        match = None if self.measured else patterns.VALUE.search(before)
        if match is None:
            return
        start = self.end - len(before)
        fields = [span for span in self.spans if span[1] <= start + match.start()]
        if any(span[1] == start + match.start() and span not in self.decimals for span in fields):
            self.measured.append((UNNAMED, float(match["value"])))
            self.spans = [*fields, (start + match.start("value"), self.end)]

    def _is_position(self, number: _Number, *, is_thousands: bool) -> bool:
        before = self._before(number.start)
        is_apart = is_thousands or not self.name[number.end : number.end + 1].isalpha()
        is_token = patterns.TOKEN_BEFORE.search(before) and is_apart
        is_part = patterns.SIBLING.search(before) or patterns.STATES_AFTER.match(
            self.name, number.end, self.end
        )
        return (number.is_whole or is_thousands) and bool(is_token) and not is_part

    def _take(self, start: int, end: int) -> bool:
        self.spans.append((start, end))
        self.ends.add(end)
        return True

    def _metrics(self) -> dict[str, float]:
        """Return the metrics with exactly one value."""
        # A name with two different values of one metric doesn't say which is the checkpoint's.
        if not self.measured:
            return {}
        names = Counter(name for name, _ in dict.fromkeys(self.measured))
        return {name: value for name, value in self.measured if name is not None and names[name] == 1}

    def _blank(self) -> str:
        parts, start = [], 0
        for begin, end in sorted(self.spans):
            parts.append(self.name[start:begin])
            start = end
        return "*".join([*parts, self.name[start:]])


def _count(number: _Number, thousand: re.Match[str] | None) -> int | None:
    """Return a count, such as ``1.5M``; None if it isn't a whole number."""
    value = number.value
    if value is None:
        return None
    count = value * (patterns.THOUSANDS[thousand[1].lower()] if thousand else 1)
    return int(count) if count == count // 1 else None


# Metrics --------------------------------------------------------------------------------------------

# The name of a metric includes all words back to the separator of fields: ``neg_val_loss`` isn't
# ``val_loss``. Where ``_`` may separate fields as well as words, as in ``teacher_val_loss_0.3``, the start of
# the name is unknown: the value is that of a metric without a name.


_METRIC = re.compile(
    r"[a-z]*(?:loss|accuracy|error|score)|acc[15]?|err|top[15]|f1|auc|auroc|bleu4?|rouge[12l]?|m?ap(?:50|75)?|"
    r"m?iou|psnr|ssim|perplexity|ppl|[wc]er|r2|r?mse|mae|dice|precision|recall|fid|reward|mrr|ndcg|kappa|"
    r"mcc|elbo|nll|bpc|metric|jaccard|specificity|sensitivity|epe|cider|meteor|chrf|bertscore|hits?|lpips|fvd|"
    r"mpjpe|pesq|stoi|mape",
    FLAGS,
)
_PART_OF_LOSS = re.compile(r"kld?|b?ce|ctc|recon|l[12]", FLAGS)
"""Names of metrics after that of a split, ``val_kl``; without it they may be weights."""

_SPLIT = re.compile(r"val|valid|validation|eval|evaluate|evaluation|test|dev|train|training", FLAGS)
_NOT_MEASURED = re.compile(r"grad|gradient|no|without|use|with", FLAGS)
"""Words before a metric's name that change its meaning: ``grad_acc_4`` accumulates gradients."""

_SETTING = re.compile(
    r"(?:.*[-_])?(?:[a-z]*lr|wd|rate|decay|weights?|ratio|scale|factor|momentum|dropout|drop|p|prob|temp|"
    r"temperature|alpha|beta[12]?|gamma|lambda|lmbda|lam|tau|eps|epsilon|sigma|mu|eta|rho|delta|theta|margin|"
    r"noise|coeff?|clip|thresh|threshold|thr|smoothing|frac|fraction|mult|strength|guidance|cfg|size|width|ver|version|"
    r"depth|ema|kld?|b?ce|ctc|recon|l[12]|[a-z])",
    FLAGS,
)
"""Names of hyper-parameters, as opposed to metrics."""

_QUALIFIER = re.compile(
    r"val|valid|validation|eval|test|train|training|dev|macro|micro|mean|avg|weighted|balanced|top[15]",
    FLAGS,
)
_AFTER = re.compile(rf"{_QUALIFIER.pattern}|epoch|step|at|k", FLAGS)
"""The same after a metric, where Lightning adds the period of the mean."""

_OF_CHECKPOINTS = re.compile(
    r"m|models?|ckpt|checkpoints?|cp|weights?|nets?|last|final|snapshot|saved?|states?|params?", FLAGS
)
"""Words before a metric's that name the checkpoint."""

_DISTINGUISHING_WORD = re.compile(
    r"(?:k?fold|cv|split|seed|rank|run|trial|exp|experiment|v|ver|version|rev|shard|epoch|ep|step|iter|e|s)\d+",
    FLAGS,
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?[km]?", FLAGS)
_COUNTED = re.compile(r"epochs?|ep|steps?|iterations?|iters?|updates?|[km]", FLAGS)
_AT = re.compile(
    r"top|at|m?ap|iou|bleu|rouge|recall|precision|hits?|ndcg|mrr|pass|(?:acc|top|m?ap)\d+", FLAGS
)
"""Words that are followed by a number in a metric's name: ``top_5_acc``, ``mAP50-95``."""

_CUTOFF = re.compile(r"@?\d+(?:\.\d+)?k?$", FLAGS)
"""The cutoff at the end of a word: ``recall@10``, ``fid50k``."""

_LAST_WORD = re.compile(
    rf"(?:{_METRIC.pattern}|{_PART_OF_LOSS.pattern}|{_AFTER.pattern}|.*[@\d])[\d.]*k?", FLAGS
)
"""Possible last words before a value: a quick test for most names."""
_SPACE = re.compile(r"--|__|[^a-z0-9_\-/@.]|(?<!\d)\.|\.(?!\d)", FLAGS)
"""Characters that end a metric's name."""
_MAX_BETWEEN = 3

MEAN_OF_METRIC = re.compile(rf"[a-z0-9]_(?:epoch|step){SEPARATOR}$", FLAGS)
"""Lightning's name of the mean over an epoch: ``train_loss_epoch``."""


def metric_key(
    before: str,
    *,
    after: str = "",
    follows_field: bool = False,
    is_decimal: bool = False,
    is_counted: bool = False,
) -> tuple[str | None, bool] | None:
    """Return the name of a metric, None if its start is unknown, and whether it is a known metric's.

    None if the value isn't a metric's. A metric of unknown name is one by its position.

    Args:
        before: Text before the value, from the end of the field before it.
        after: Text after the value.
        follows_field: Whether a field ends at the start of ``before``.
        is_decimal: Whether the value isn't a whole number.
        is_counted: Whether an epoch or a step is before it: values assigned after these were measured there,
            except those with the name of a hyper-parameter.
    """
    # The words before the value are cut at the last separator of fields, and at the last number that is a
    # field itself (``model_3_``, ``fold1_``); words that name the checkpoint are removed from the front
    # (``best_model_``). The rest is the name if it ends like a known metric, or if it is assigned (``=``).
    # Its start is certain only after a field, a cut or a separator unlike those within it.
    text = before.rstrip("-_=.: ([")
    is_assigned = before[len(text) :].startswith("=")
    cut = max((match.end() for match in _SPACE.finditer(text)), default=0)
    is_value_cut = text[cut - 1 : cut] == "="  # in opt=adam_val_loss=0.3
    text = text[cut:]
    last_word = text.replace("-", "_").replace("/", "_").rpartition("_")[2]
    if not is_assigned and not _LAST_WORD.fullmatch(last_word):
        return None
    parts = re.split(r"([-_])", text.strip("-_./@"))
    start = _first_word(parts)
    is_decided = ((follows_field or cut > 0) and not is_value_cut) or start > 0
    parts = parts[start:]
    while len(parts) > 1 and (
        parts[0].lower() == "best" or (not is_decided and _OF_CHECKPOINTS.fullmatch(parts[0]))
    ):
        parts = parts[2:]
    dash = max((at for at in range(1, len(parts), 2) if _is_dash(parts, at)), default=0)
    if dash and "_" in parts[dash:]:
        parts, is_decided = parts[dash + 1 :], True
    elif not dash and "_" in parts and after.startswith("-"):
        is_decided = True  # it is "-" that separates the fields
    if _NUMBER.fullmatch(parts[-1]) and not (is_assigned or is_decimal):
        return None
    first = _start_of_metric(parts)
    if first is not None:
        return ("".join(parts) if is_decided or first == 0 else None), True
    is_of_data = len(parts) == 1 and _SPLIT.fullmatch(parts[0])
    is_other = (
        follows_field and is_counted and not cut and parts[0] and not _SETTING.fullmatch("".join(parts))
    )
    if not (is_assigned and is_decimal and (is_of_data or is_other)):
        return None
    return "".join(parts), bool(is_of_data)


def _first_word(parts: list[str]) -> int:
    """Return the index of the first word after the last number that is a field: ``model_3_``, ``fold1_``."""
    for at in range(len(parts) - 3, -1, -2):
        is_field = _NUMBER.fullmatch(parts[at]) and not (at and _AT.fullmatch(parts[at - 2]))
        if is_field or _DISTINGUISHING_WORD.fullmatch(parts[at]):
            return at + 4 if _COUNTED.fullmatch(parts[at + 2]) and at + 4 < len(parts) else at + 2
    return 0


def _is_dash(parts: list[str], at: int) -> bool:
    """Return whether ``-`` joins two words, and not a word and a number as in ``BLEU-4``."""
    return parts[at] == "-" and not any(_NUMBER.fullmatch(part) for part in parts[at - 1 : at + 2 : 2])


def _start_of_metric(parts: list[str]) -> int | None:
    """Return the index of the first word of a known metric: ``val_loss``, ``val_ce_loss``, ``f1_macro``.

    None if the words are no metric, such as ``loss_weight``.
    """
    last = len(parts) - 1
    while last > 0 and not _METRIC.fullmatch(parts[last]):
        if not _AFTER.fullmatch(parts[last]) and not _NUMBER.fullmatch(parts[last]):
            break
        last -= 2
    before = parts[last - 2] if last >= 2 else ""
    word = parts[last].rpartition("/")[2]
    is_metric = _METRIC.fullmatch(word) or _METRIC.fullmatch(_CUTOFF.sub("", word))
    is_part = _PART_OF_LOSS.fullmatch(word) and (_SPLIT.fullmatch(before) or "/" in parts[last])
    if not (is_metric or is_part) or _NOT_MEASURED.fullmatch(before):
        return None
    first = last
    while first >= 2 and any(one.fullmatch(parts[first - 2]) for one in (_QUALIFIER, _METRIC, _NUMBER, _AT)):
        first -= 2
    for further in range(first - 4, max(-1, first - 4 - 2 * _MAX_BETWEEN), -2):
        if _SPLIT.fullmatch(parts[further]):
            return further
    return first
