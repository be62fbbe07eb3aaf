"""What fields in names look like: epochs, steps, dates, metrics, values, and what tells siblings apart."""

from __future__ import annotations

import re

_FLAGS = re.ASCII | re.IGNORECASE
SEPARATOR = r"[-_=.: (\[]{0,2}"
"""What may stand between a key and its number."""

SUFFIX = re.compile(r"\.(?:weights\.h5|[a-z]{1,12}|h5|hdf5|pt2)$", _FLAGS)
SHARD = re.compile(r"(?<![0-9])(?:[0-9]+|\?{5})[-_]of[-_][0-9]+(?![0-9])", _FLAGS)
DATE = re.compile(
    r"(?<![0-9])((?:19|20)[0-9]{2})([-_.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12][0-9]|3[01])"
    r"(?:[-_t @.]?([01][0-9]|2[0-3])([-_:.h]?)([0-5][0-9])(?:\6([0-5][0-9]))?)?(?![0-9])",
    _FLAGS,
)
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[-+][0-9]+)?", _FLAGS)

EPOCH = re.compile(rf"(?:epochs?|(?:^|[^a-z])ep){SEPARATOR}$", _FLAGS)
STEP = re.compile(
    rf"(?:^|[^a-z])(?:global[-_]?)?(?:steps?|iterations?|iters?|itr|it|updates?){SEPARATOR}$", _FLAGS
)
TOTAL = re.compile(
    r"(?:^|[^a-z])(?:(?:num|total|max|warmup)[-_]?(?:epoch|step|iteration|iter)s?|"
    rf"n[-_]?(?:epochs|steps|iterations|iters)|accum[a-z]*[-_]?steps?|acc[-_]?steps){SEPARATOR}$",
    _FLAGS,
)
EPOCH_BEHIND = re.compile(r"[-_ ]?(?:epochs?|ep)(?![a-z0-9])", _FLAGS)
STEP_BEHIND = re.compile(r"[km]?[-_ ]?(?:steps?|iterations?|iters?|updates?)(?![a-z0-9])", _FLAGS)
LETTER = re.compile(r"(?:^|[-_. ])([es])$", _FLAGS)
THOUSANDS = {"k": 1_000, "m": 1_000_000}
THOUSAND = re.compile(r"([km])(?![a-z0-9])", _FLAGS)

ORDINAL = re.compile(
    r"(?:^|(?:^|[^a-z])(?:models?|ckpt|checkpoints?|cp|epochs?|nets?|weights?|params?|snapshots?|snap|states?|iter|"
    rf"step|saved?|improvements?)){SEPARATOR}$",
    _FLAGS,
)
"""What a bare number follows that counts saves: after ``digit_3`` or ``llama3`` it tells models apart."""

COUNTS_EPOCHS = re.compile(r"\.(?:keras|h5|hdf5)$|^(?:cp[-_.])?[0-9]+\.ckpt$", _FLAGS)
"""Whose bare number is an epoch: Keras's ModelCheckpoint has no other count to put into a name."""

KERAS_EPOCH = re.compile(
    r"e[0-9]{1,18}(?:[-_ ](?:-?[0-9]{1,18}\.[0-9]{1,18}|nan)){1,4}\.(?:keras|h5|hdf5|weights\.h5)", _FLAGS
)
"""``e{epoch}-{val_loss:.4f}.keras``: where nothing but measurements follow, no experiment is meant."""

_MEASURED = r"(?:-?[0-9]{1,18}\.[0-9]{1,18}|nan)"
KERAS_TAIL = re.compile(
    r"(?P<word>[a-z])(?P<part>[1-9][0-9]{1,5}|(?<=[a-z]{4}v)[0-9]|(?<=[a-z]{4}[-_]v)[0-9])?"
    rf"\.(?P<epoch>[0-9]{{1,18}})-(?={_MEASURED}(?:-{_MEASURED}){{0,3}}$)",
    _FLAGS,
)
"""``{any}.{epoch:02d}-{val_loss:.2f}``, as ModelCheckpoint's documentation names files, where any may end as
``resnet50`` or ``mobilenet_v2`` do; what could be a decimal, as in ``lr0.01-0.87``, is none of it."""
KERAS_FILE = re.compile(r"\.(?:keras|h5|hdf5)$", _FLAGS)

VALUE = re.compile(
    r"(?<=[0-9])(?:[-_ ]|__)(?P<value>-?(?:[0-9]+(?:\.[0-9]+|(?:\.[0-9]+)?e[-+][0-9]+)|nan))$", _FLAGS
)
"""What ``{epoch:02d}-{val_loss:.2f}`` puts behind the epoch, at the end of the name."""

BEST = re.compile(r"(?:^|[^a-z])best(?![a-z])", _FLAGS)
PAIR = re.compile(
    r"((?:ckpt|checkpoint|cp|snapshot)[-_]|(?:[^0-9].{0,200}?[^a-z])?epoch[-_=]?)"
    r"([0-9]{1,18})([-_])([0-9]{1,18})((?:\.[a-z][a-z0-9]{0,12}){0,2})",
    _FLAGS,
)
"""Epoch and step, where several names bear it out: ``ckpt-5-3500.pt``, ``model_epoch5_3500.pth``."""
PLAIN_WORD = re.compile(
    rf"(?:^|[^a-z])(?:model|best|ckpt|checkpoint|weights|net|last|final|snapshot){SEPARATOR}$", _FLAGS
)
SIBLING = re.compile(
    r"(?:^|[^a-z])(?:k?fold|cv|split|seed|rank|run|trial|exp|experiment|gpu|device|worker|node|host|job|task|"
    r"sub|subj|subject|patient|v|ver|version|rev|part|shard|expert|member|ensemble|head|heads|layer|layers|"
    r"stage|phase|level|size|bs|batch|batchsize|dim|hidden|width|depth|lr|wd|config|cfg|variant|group|class|"
    r"domain|client|agent|env|trainer|pserver|consolidated|random_states?|rng_states?|rng|custom_checkpoint|"
    r"dist_optim|pt|pth|bin|tp|pp|dp|mp|zero|fsdp|chunk|piece|slice|"
    rf"[fknrsx]){SEPARATOR}$",
    _FLAGS,
)
STATES_BEHIND = re.compile(r"[-_](?:model|optim)_states(?![a-z0-9])", _FLAGS)
AFTER_NUMBER = re.compile(r"[0-9][-_. =]{1,2}$")
TOKEN_BEFORE = re.compile(r"(?:^|[^a-z0-9])[a-z]*$", _FLAGS)
TRAINER = re.compile(r"checkpoint-([0-9]{1,18})", _FLAGS)
STEP_DIRECTORY = re.compile(
    r"(?:(?:models?|weights|nets?|states?|saved?|snapshot|checkpoint|ckpt)[-_=.]?){0,2}"
    r"(?:(?:(?:global[-_]?)?(?:step|iter|iteration|epoch|update)|checkpoint|ckpt)[-_=.]?[0-9]{1,18}"
    r"(?:[-_.,](?!$)|$)){1,3}"
    r"|(?:.{1,200}[-_])?e[0-9]{3,18}[-_]s[0-9]{3,18}(?:[-_].{1,200})?",
    _FLAGS,
)
"""How a directory is called that holds one save: its count alone, ``iter_0000100``, ``epoch_3-step_1200``, or
epoch and step as a template of ``rename`` has them: ``exp1-e0003-s00001200-0.3412``. What is called
``resnet_epoch_50`` could be one of several trials."""

# Ours -----------------------------------------------------------------------------------------------

PINS = ".ckpttool-pins.toml"
PIN_LISTS = (PINS, ".ckpttool.toml")
"""Names of lists of pins; that of the second looks too much like a configuration's to be given any more."""

# Metrics --------------------------------------------------------------------------------------------

WORDS = re.compile(rf"((?:[a-z][a-z0-9]*[-_/])*[a-z][a-z0-9]*){SEPARATOR}$", _FLAGS)
_METRIC = re.compile(
    r"[a-z]*(?:loss|accuracy|error|score)|acc[15]?|err|top[15]|f1|auc|auroc|bleu4?|rouge[12l]?|m?ap(?:50|75)?|"
    r"m?iou|psnr|ssim|perplexity|ppl|[wc]er|r2|r?mse|mae|dice|precision|recall|fid|reward|mrr|ndcg|kappa|"
    r"mcc|elbo|nll|bpc|metric|jaccard|specificity|sensitivity|epe|cider|meteor|chrf|bertscore",
    _FLAGS,
)
_PART_OF_LOSS = re.compile(r"kld?|b?ce|ctc|recon|l[12]", _FLAGS)
"""What is a metric where it is of some data, ``val_kl``, and may be a weight elsewhere."""

_SPLIT = re.compile(r"val|valid|validation|eval|test|dev|train|training", _FLAGS)
_NOT_MEASURED = re.compile(r"grad|gradient|no|without|use|with", _FLAGS)
"""Words before a metric's that make something else of it: ``grad_acc_4`` accumulates."""

MEAN_OF_METRIC = re.compile(rf"[a-z0-9]_(?:epoch|step){SEPARATOR}$", _FLAGS)
"""How Lightning calls the mean over an epoch: ``train_loss_epoch``."""

BITS = frozenset({"16", "32", "64"})
"""What follows ``precision`` where it is that of the numbers."""

IN_WORD = re.compile(
    r"(?:(?<![a-z])|(?<=_))(?:acc|top|m?ap)(?:50[-_]95|1|5|10|50|75)(?=[-_=: @]{1,2}[0-9])", _FLAGS
)
"""A number that is a part of a metric's name: ``acc1_76.13``."""

NO_NUMBER = re.compile(r"=(nan|[-+]?inf)(?![a-z0-9])", _FLAGS)
"""What Lightning writes into a name for a metric that is no finite number."""

FRACTION = re.compile(
    r"_([0-9]{1,18})(?![a-z0-9]|\.[0-9]|[-_]of[-_]|"
    r"[-_ ]?(?:epochs?|ep|steps?|iterations?|iters?|updates?)(?![a-z0-9]))",
    _FLAGS,
)
"""What follows ``val_loss_0`` where somebody wrote ``_`` for the point: in ``val_loss_1_25`` nobody knows."""

_MAX_BETWEEN = 3
_QUALIFIER = re.compile(
    r"val|valid|validation|eval|test|train|training|dev|macro|micro|mean|avg|weighted|balanced|top[15]",
    _FLAGS,
)
_QUALIFIES = re.compile(rf"{_QUALIFIER.pattern}|epoch|step", _FLAGS)
"""The same behind a metric, where Lightning says over what it took the mean."""


def metric_name(words: str) -> str | None:
    """Return the metric that words before a number name: one of their last words, and what qualifies it.

    ``val_loss``, ``val_ce_loss``, ``f1_macro`` and ``loss_val`` are metrics, and ``loss_weight`` is none.
    """
    parts = re.split(r"([-_/])", words)
    last = len(parts) - 1
    while last > 0 and _QUALIFIES.fullmatch(parts[last]) and not _METRIC.fullmatch(parts[last]):
        last -= 2
    before = parts[last - 2] if last >= 2 else ""
    is_part = _PART_OF_LOSS.fullmatch(parts[last]) and _SPLIT.fullmatch(before)
    if not (_METRIC.fullmatch(parts[last]) or is_part) or _NOT_MEASURED.fullmatch(before):
        return None
    first = last
    while first >= 2 and (_QUALIFIER.fullmatch(parts[first - 2]) or _METRIC.fullmatch(parts[first - 2])):
        first -= 2
    for further in range(first - 4, max(-1, first - 4 - 2 * _MAX_BETWEEN), -2):
        if parts[further + 1] == "_" and _SPLIT.fullmatch(parts[further]):
            if "best" not in map(str.lower, parts[further:first]):
                first = further
            break
    return "".join(parts[first:])
