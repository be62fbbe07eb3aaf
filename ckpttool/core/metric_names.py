"""The name of a metric whose value stands in a checkpoint's name: all of it, back to what separates fields.

``model_3_neg_val_loss=-0.3`` has a ``neg_val_loss``, which is no ``val_loss``. Where ``_`` may separate
fields as well as words, as in ``teacher_val_loss_0.3``, nobody can say where the name begins: the value is a
metric's then, and nobody knows of which.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpttool.core.name_patterns import FLAGS, SEPARATOR

_METRIC = re.compile(
    r"[a-z]*(?:loss|accuracy|error|score)|acc[15]?|err|top[15]|f1|auc|auroc|bleu4?|rouge[12l]?|m?ap(?:50|75)?|"
    r"m?iou|psnr|ssim|perplexity|ppl|[wc]er|r2|r?mse|mae|dice|precision|recall|fid|reward|mrr|ndcg|kappa|"
    r"mcc|elbo|nll|bpc|metric|jaccard|specificity|sensitivity|epe|cider|meteor|chrf|bertscore|hits?|lpips|fvd|"
    r"mpjpe|pesq|stoi|mape",
    FLAGS,
)
_PART_OF_LOSS = re.compile(r"kld?|b?ce|ctc|recon|l[12]", FLAGS)
"""What is a metric where it is of some data, ``val_kl``, and may be a weight elsewhere."""

_SPLIT = re.compile(r"val|valid|validation|eval|evaluate|evaluation|test|dev|train|training", FLAGS)
_NOT_MEASURED = re.compile(r"grad|gradient|no|without|use|with", FLAGS)
"""Words before a metric's that make something else of it: ``grad_acc_4`` accumulates."""

_SETTING = re.compile(
    r"(?:.*[-_])?(?:[a-z]*lr|wd|rate|decay|weights?|ratio|scale|factor|momentum|dropout|drop|p|prob|temp|"
    r"temperature|alpha|beta[12]?|gamma|lambda|lmbda|lam|tau|eps|epsilon|sigma|mu|eta|rho|delta|theta|margin|"
    r"noise|coeff?|clip|thresh|threshold|thr|smoothing|frac|fraction|mult|strength|guidance|cfg|size|width|ver|version|"
    r"depth|ema|kld?|b?ce|ctc|recon|l[12]|[a-z])",
    FLAGS,
)
"""Names of what is set for a run and not measured in it."""

_QUALIFIER = re.compile(
    r"val|valid|validation|eval|test|train|training|dev|macro|micro|mean|avg|weighted|balanced|top[15]",
    FLAGS,
)
_BEHIND = re.compile(rf"{_QUALIFIER.pattern}|epoch|step|at|k", FLAGS)
"""The same behind a metric, where Lightning says over what it took the mean."""

_OF_CHECKPOINTS = re.compile(
    r"m|models?|ckpt|checkpoints?|cp|weights?|nets?|last|final|snapshot|saved?|states?|params?", FLAGS
)
"""Words before a metric's that name the checkpoint."""

_TELLS_CHECKPOINTS_APART = re.compile(
    r"(?:k?fold|cv|split|seed|rank|run|trial|exp|experiment|v|ver|version|rev|shard|epoch|ep|step|iter|e|s)\d+",
    FLAGS,
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?[km]?", FLAGS)
_COUNTED = re.compile(r"epochs?|ep|steps?|iterations?|iters?|updates?|[km]", FLAGS)
_AT = re.compile(
    r"top|at|m?ap|iou|bleu|rouge|recall|precision|hits?|ndcg|mrr|pass|(?:acc|top|m?ap)\d+", FLAGS
)
"""What has a number for its second word: ``top_5_acc``, ``mAP50-95``."""

_CUTOFF = re.compile(r"@?\d+(?:\.\d+)?k?$", FLAGS)
"""How many are counted, at the end of a word: ``recall@10``, ``fid50k``."""

_LAST_WORD = re.compile(
    rf"(?:{_METRIC.pattern}|{_PART_OF_LOSS.pattern}|{_BEHIND.pattern}|.*[@\d])[\d.]*k?", FLAGS
)
"""What the last word before a value may be, so that most need no other look."""
_SPACE = re.compile(r"--|__|[^a-z0-9_\-/@.]|(?<!\d)\.|\.(?!\d)", FLAGS)
"""What no name of a metric has inside."""
_MAX_BETWEEN = 3

MEAN_OF_METRIC = re.compile(rf"[a-z0-9]_(?:epoch|step){SEPARATOR}$", FLAGS)
"""How Lightning calls the mean over an epoch: ``train_loss_epoch``."""


class MetricKey(NamedTuple):
    """What is in front of a metric's value.

    Attributes:
        name: None where nobody can say where it begins.
        is_known: Whether it names a metric, and not what may be one by its place.
    """

    name: str | None
    is_known: bool = True


def metric_key(
    before: str,
    *,
    behind: str = "",
    follows_field: bool = False,
    is_decimal: bool = False,
    is_counted: bool = False,
) -> MetricKey | None:
    """Return the key of a metric, or None where it is none.

    Args:
        before: What stands before the value, from the end of the field before it.
        behind: What follows the value.
        follows_field: Whether a field ends where ``before`` begins.
        is_decimal: Whether the value is no whole number.
        is_counted: Whether one of the fields before it is an epoch or a step: what is assigned behind these
            was measured there, unless it is called like a setting.
    """
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
    while len(parts) > 1 and (parts[0].lower() == "best" or _is_of_checkpoint(parts[0], is_decided)):
        parts = parts[2:]
    dash = max((at for at in range(1, len(parts), 2) if _is_dash(parts, at)), default=0)
    if dash and "_" in parts[dash:]:
        parts, is_decided = parts[dash + 1 :], True
    elif not dash and "_" in parts and behind.startswith("-"):
        is_decided = True  # it is "-" that separates the fields
    if _NUMBER.fullmatch(parts[-1]) and not (is_assigned or is_decimal):
        return None
    first = _start_of_metric(parts)
    if first is not None:
        return MetricKey("".join(parts) if is_decided or first == 0 else None)
    is_of_data = len(parts) == 1 and _SPLIT.fullmatch(parts[0])
    is_other = (
        follows_field and is_counted and not cut and parts[0] and not _SETTING.fullmatch("".join(parts))
    )
    if not (is_assigned and is_decimal and (is_of_data or is_other)):
        return None
    return MetricKey("".join(parts), is_known=bool(is_of_data))


def _is_of_checkpoint(word: str, is_decided: bool) -> bool:
    return not is_decided and _OF_CHECKPOINTS.fullmatch(word) is not None


def _first_word(parts: list[str]) -> int:
    """Return where the words behind the last number that is a field begin: ``model_3_``, ``fold1_``."""
    for at in range(len(parts) - 3, -1, -2):
        is_field = _NUMBER.fullmatch(parts[at]) and not (at and _AT.fullmatch(parts[at - 2]))
        if is_field or _TELLS_CHECKPOINTS_APART.fullmatch(parts[at]):
            return at + 4 if _COUNTED.fullmatch(parts[at + 2]) and at + 4 < len(parts) else at + 2
    return 0


def _is_dash(parts: list[str], at: int) -> bool:
    """Tell whether words are joined by ``-``; what joins a number to a word is none: ``BLEU-4``."""
    return parts[at] == "-" and not any(_NUMBER.fullmatch(part) for part in parts[at - 1 : at + 2 : 2])


def _start_of_metric(parts: list[str]) -> int | None:
    """Return where the words begin that are surely a metric's: ``val_loss``, ``val_ce_loss``, ``f1_macro``.

    None where these are no metric, such as ``loss_weight``.
    """
    last = len(parts) - 1
    while last > 0 and not _METRIC.fullmatch(parts[last]):
        if not _BEHIND.fullmatch(parts[last]) and not _NUMBER.fullmatch(parts[last]):
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
