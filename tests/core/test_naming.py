"""Names and their fields: what is recognised, what is left alone, and how long that may take."""

from __future__ import annotations

import math
import time

from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttool.core.naming import is_named_best, parse_name

RECOGNISED = """
model_epoch_10.pth | model_epoch_*.pth | epoch 10
epoch=3-step=100-val_loss=0.32.ckpt | epoch=*-step=*-val_loss=*.ckpt | epoch 3, step 100, val_loss=0.32
epoch=3-val_loss=-0.32.ckpt | epoch=*-val_loss=*.ckpt | epoch 3, val_loss=-0.32
sd-model-epoch=03.ckpt | sd-model-epoch=*.ckpt | epoch 3
step_2500.pt | step_*.pt | step 2500
step_10k.pt | step_*.pt | step 10000
2026-01-31_12-00-00_e07.pth | *_e*.pth | epoch 7, saved 2026-01-31T12:00:00
state_2026-01-31.pt | state_*.pt | saved 2026-01-31
20260131120000.pt | *.pt | saved 2026-01-31T12:00:00
checkpoint-500 | checkpoint-* | step 500
model-20260131-120000-e0007-s00002500-0.1234.pt | model-*-e*-s*-*.pt | epoch 7, step 2500, saved 2026-01-31T12:00:00, value=0.1234
ckpt_e3.pt | ckpt_e*.pt | epoch 3
e07.pth | e*.pth | epoch 7
iter_0001000 | iter_* | step 1000
global_step1000 | global_step* | step 1000
rl_model_10000_steps.zip | rl_model_*_steps.zip | step 10000
net_3_epochs.pt | net_*_epochs.pt | epoch 3
resnet18_epoch_9.pth | resnet18_epoch_*.pth | epoch 9
fold1_ep3.pth | fold1_ep*.pth | epoch 3
epoch_1.5 | epoch_* | epoch 1.5
epoch_3_of_10.pt | epoch_*_of_10.pt | epoch 3
best_acc_0.93.pth | best_acc_*.pth | acc=0.93
val_f1_0.9_e3.pt | val_f1_*_e*.pt | epoch 3, val_f1=0.9
lr_0.001_epoch_3.pt | lr_0.001_epoch_*.pt | epoch 3
lm_acc_steps_4_epoch_3.pt | lm_acc_steps_4_epoch_*.pt | epoch 3
lm_grad_accum_step8_step_3.pt | lm_grad_accum_step8_step_*.pt | step 3
num_epochs_100_epoch_3.pt | num_epochs_100_epoch_*.pt | epoch 3
epoch=11-step=999-v1.ckpt | epoch=*-step=*-v1.ckpt | epoch 11, step 999
# The last number, where nothing is named.
model.0042.pt | model.*.pt | number 42
model_05_0.87.pth | model_*_*.pth | number 5, value=0.87
ckpt-5 | ckpt-* | number 5
model.ckpt-100.data-00000-of-00001 | model.ckpt-*.data-00000-of-00001 | number 100
checkpoint_12.pth | checkpoint_*.pth | number 12
0042.pt | *.pt | number 42
1 | * | number 1
model_3_seed_1.pth | model_*_seed_1.pth | number 3
model_0.93.pth | model_*.pth | -
2026-02-31.pt | 2026-02-*.pt | number 31
model_500k.pt | model_*.pt | number 500000
model_125m.pt | model_125m.pt | -
lenet_500k.pt | lenet_500k.pt | -
# Beside a metric, where it follows a word that says that it counts saves.
model_3_loss_0.33.pth | model_*_loss_*.pth | number 3, loss=0.33
ckpt_3_acc0.9.pth | ckpt_*_acc*.pth | number 3, acc=0.9
vgg_16_loss_0.33.pth | vgg_16_loss_*.pth | loss=0.33
resnet50_acc_0.9.pth | resnet50_acc_*.pth | -
# As Keras's ModelCheckpoint is told to name them.
model.05-0.87.keras | model.*-*.keras | epoch 5, number 5, value=0.87
weights.10-0.25.hdf5 | weights.*-*.hdf5 | epoch 10, number 10, value=0.25
weights.10-2.00.h5 | weights.*-*.h5 | epoch 10, number 10, value=2
weights.02--1.50.h5 | weights.*-*.h5 | epoch 2, number 2, value=-1.5
weights.03-1e-05.h5 | weights.*-*.h5 | epoch 3, number 3, value=1e-05
model_05_0.87.weights.h5 | model_*_*.weights.h5 | epoch 5, number 5, value=0.87
05-0.32.keras | *-*.keras | epoch 5, number 5, value=0.32
cp-0003.weights.h5 | cp-*.weights.h5 | epoch 3, number 3
cp-0003.ckpt | cp-*.ckpt | epoch 3, number 3
12.ckpt | *.ckpt | epoch 12, number 12
model.3.keras | model.*.keras | epoch 3, number 3
weights-improvement-05-0.87.hdf5 | weights-improvement-*-*.hdf5 | epoch 5, number 5, value=0.87
model-epoch03-val_accuracy0.91.keras | model-epoch*-val_accuracy*.keras | epoch 3, val_accuracy=0.91
# What Lightning, and people, put into names; settings beside it are none.
epoch=3-step=100-val_loss=0.12-v1.ckpt | epoch=*-step=*-val_loss=*-v1.ckpt | epoch 3, step 100, val_loss=0.12
epoch=3-val/loss=0.12.ckpt | epoch=*-val/loss=*.ckpt | epoch 3, val/loss=0.12
epoch=3-val_ce_loss=0.20.ckpt | epoch=*-val_ce_loss=*.ckpt | epoch 3, val_ce_loss=0.2
epoch=3-val_f1_macro=0.7.ckpt | epoch=*-val_f1_macro=*.ckpt | epoch 3, val_f1_macro=0.7
epoch=3-val_top1=0.7.ckpt | epoch=*-val_top1=*.ckpt | epoch 3, val_top1=0.7
epoch=3-val_kl=0.7.ckpt | epoch=*-val_kl=*.ckpt | epoch 3, val_kl=0.7
acc_test=0.7-epoch=3.ckpt | acc_test=*-epoch=*.ckpt | epoch 3, acc_test=0.7
train_loss_epoch=0.5-epoch=3.ckpt | train_loss_epoch=*-epoch=*.ckpt | epoch 3, train_loss_epoch=0.5
train_loss_epoch_3.pt | train_loss_epoch_*.pt | epoch 3
10-epoch-loss-0.3.pt | *-epoch-loss-*.pt | epoch 10, loss=0.3
best_acc1_76.13.pth | best_acc1_*.pth | acc1=76.13
map50_0.51_epoch3.pt | map50_*_epoch*.pt | epoch 3, map50=0.51
mAP50-95_0.51_epoch3.pt | mAP50-95_*_epoch*.pt | epoch 3, mAP50-95=0.51
acc_0.93 | acc_* | acc=0.93
lr=0.001-wd=0.1-epoch=3-val_loss=0.2.ckpt | lr=0.001-wd=0.1-epoch=*-val_loss=*.ckpt | epoch 3, val_loss=0.2
loss_weight=0.5-epoch=3.ckpt | loss_weight=0.5-epoch=*.ckpt | epoch 3
kl=0.1-epoch=3.ckpt | kl=0.1-epoch=*.ckpt | epoch 3
precision=16-epoch=3.ckpt | precision=16-epoch=*.ckpt | epoch 3
precision=0.93-epoch=3.ckpt | precision=*-epoch=*.ckpt | epoch 3, precision=0.93
grad_acc_4_epoch_3.pt | grad_acc_4_epoch_*.pt | epoch 3
epoch=2-val_loss=inf.ckpt | epoch=*-val_loss=*.ckpt | epoch 2, val_loss=inf
epoch=2-val_loss=-inf-v1.ckpt | epoch=*-val_loss=*-v1.ckpt | epoch 2, val_loss=-inf
# Two decimals without a name are two metrics, of which nobody knows which is which.
model.05-0.87-0.32.keras | model.*-*-*.keras | epoch 5, number 5
fold1-05-0.87.h5 | fold1-*-*.h5 | number 5, value=0.87
# What Keras's documentation calls its files, behind the names of models.
cnn_digits.05-0.87.keras | cnn_digits.*-*.keras | epoch 5, number 5, value=0.87
cnn_digits.5--0.87.weights.h5 | cnn_digits.*-*.weights.h5 | epoch 5, number 5, value=-0.87
resnet50.05-0.87.h5 | resnet50.*-*.h5 | epoch 5, number 5, value=0.87
mobilenet_v2.12-0.87.hdf5 | mobilenet_v2.*-*.hdf5 | epoch 12, number 12, value=0.87
cnn.05-0.87-0.32.keras | cnn.*-*-*.keras | epoch 5, number 5
cnn.05-0.87.pt | cnn.*-*.pt | epoch 5, number 5, value=0.87
cnn.5-0.87.pt | cnn.*-*.pt | number 5, value=0.87
# What could be a decimal, or tells siblings apart, is no epoch.
net_lr0.01-0.87.keras | net_lr0.01-*.keras | -
model_v1.05-0.87.keras | model_v1.05-*.keras | -
val_acc.95-0.87.keras | val_acc.*-*.keras | val_acc=95
net_lr.05-0.87.keras | net_lr.05-*.keras | -
mobilenet1.25-0.87.keras | mobilenet1.25-*.keras | -
model-3-v1.5.keras | model-*-v1.5.keras | epoch 3, number 3
# Keras's ModelCheckpoint has nothing to count but epochs; elsewhere e1 may be an experiment.
e1-0.2304.keras | e*-*.keras | epoch 1, value=0.2304
e12-0.2304.weights.h5 | e*-*.weights.h5 | epoch 12, value=0.2304
e3_-0.5.h5 | e*_*.h5 | epoch 3, value=-0.5
e3-nan.keras | e*-*.keras | epoch 3, value=nan
e1-0.2304.pt | e*-*.pt | number 1, value=0.2304
e1-unet-0.2304.keras | e*-unet-0.2304.keras | number 1
e1-2.keras | e1-*.keras | number 2
# An underscore for the point.
model_epoch_1_val_loss_0_25.pt | model_epoch_*_val_loss_*.pt | epoch 1, val_loss=0.25
loss_0_25_acc_0_93.pt | loss_*_acc_*.pt | loss=0.25, acc=0.93
val_loss_0_05 | val_loss_* | val_loss=0.05
model_epoch_1_val_loss_1_23.pt | model_epoch_*_val_loss_*.pt | epoch 1
loss_0_25_epoch_3.pt | loss_*_epoch_*.pt | epoch 3, loss=0.25
acc_93_epoch_3.pt | acc_*_epoch_*.pt | epoch 3, acc=93
loss_0_10_epochs.pt | loss_*_*_epochs.pt | epoch 10, loss=0
loss_0_step_3.pt | loss_*_step_*.pt | step 3, loss=0
loss_0_20240101.pt | loss_*_*.pt | saved 2024-01-01, loss=0
loss_0_00001-of-00002.pt | loss_*_00001-of-00002.pt | loss=0
loss_0_25.5.pt | loss_*_*.pt | loss=0
# Behind a field, or behind what separates fields, the name of a metric is all of it.
model_3_neg_val_loss=-0.3452.pt | model_*_neg_val_loss=*.pt | number 3, neg_val_loss=-0.3452
model_1_log_loss=0.9.pt | model_*_log_loss=*.pt | number 1, log_loss=0.9
m-epoch=0-teacher_val_loss=0.1-val_loss=0.9.pt | m-epoch=*-teacher_val_loss=*-val_loss=*.pt | epoch 0, teacher_val_loss=0.1, val_loss=0.9
epoch_3_teacher_val_loss_0.1.pt | epoch_*_teacher_val_loss_*.pt | epoch 3, teacher_val_loss=0.1
teacher_val_loss=0.1-epoch=3.ckpt | teacher_val_loss=*-epoch=*.ckpt | epoch 3, teacher_val_loss=0.1
Conformer--val_wer=0.05-epoch=1.ckpt | Conformer--val_wer=*-epoch=*.ckpt | epoch 1, val_wer=0.05
sd-model-val_loss=0.3.ckpt | sd-model-val_loss=*.ckpt | val_loss=0.3
epoch=3-val-loss=0.2.ckpt | epoch=*-val-loss=*.ckpt | epoch 3, val-loss=0.2
epoch=3-v1-val_loss=0.2.ckpt | epoch=*-v1-val_loss=*.ckpt | epoch 3, val_loss=0.2
best_model_val_loss_0.3.pth | best_model_val_loss_*.pth | val_loss=0.3
step=9-evaluate=0.7 | step=*-evaluate=* | step 9, evaluate=0.7
evaluate=0.7-step=9 | evaluate=*-step=* | step 9, evaluate=0.7
epoch=3-elo=1500.5.ckpt | epoch=*-elo=*.ckpt | epoch 3, elo=1500.5
epoch=1-neg_val_loss=-inf.ckpt | epoch=*-neg_val_loss=*.ckpt | epoch 1, neg_val_loss=-inf
unet (loss 0.3).pt | unet (loss *).pt | loss=0.3
# With the numbers in it.
epoch=0-BLEU-4=0.91.pt | epoch=*-BLEU-4=*.pt | epoch 0, BLEU-4=0.91
BLEU-4=0.91-epoch=0.pt | BLEU-4=*-epoch=*.pt | epoch 0, BLEU-4=0.91
model_bleu_4_0.91.pt | model_bleu_4_*.pt | bleu_4=0.91
epoch=0-mAP_0.5=0.91.pt | epoch=*-mAP_0.5=*.pt | epoch 0, mAP_0.5=0.91
epoch_0_mAP_0.5_0.91.pt | epoch_*_mAP_0.5_*.pt | epoch 0, mAP_0.5=0.91
fid50k=7.1-step=1000.ckpt | fid50k=*-step=*.ckpt | step 1000, fid50k=7.1
epoch=3-top-5-acc=0.91.ckpt | epoch=*-top-5-acc=*.ckpt | epoch 3, top-5-acc=0.91
epoch_3_top_5_acc_0.91.pt | epoch_*_top_5_acc_*.pt | epoch 3, top_5_acc=0.91
recall@10=0.5-epoch=1.ckpt | recall@10=*-epoch=*.ckpt | epoch 1, recall@10=0.5
epoch=3-hits_at_1=0.5.ckpt | epoch=*-hits_at_1=*.ckpt | epoch 3, hits_at_1=0.5
# Nobody knows where it begins, but a measurement is none of the series' name.
teacher_val_loss=0.1.pt | teacher_val_loss=*.pt | -
teacher_val_loss_0.1_epoch_3.pt | teacher_val_loss_*_epoch_*.pt | epoch 3
sd-model-val-loss=0.3.ckpt | sd-model-val-loss=*.ckpt | -
val_loss=0.3_val_loss=0.4.pt | val_loss=*_val_loss=*.pt | -
opt=adam_val_loss=0.3.pt | opt=adam_val_loss=*.pt | -
# What is set, not measured.
epoch=3-alpha=0.5.ckpt | epoch=*-alpha=0.5.ckpt | epoch 3
epoch=3-loss_weight=0.5.ckpt | epoch=*-loss_weight=0.5.ckpt | epoch 3
foo=0.5-epoch=3.ckpt | foo=0.5-epoch=*.ckpt | epoch 3
# Counts of Composer, NeMo, LeRobot and others.
ep1-ba100-rank0.pt | ep*-ba*-rank0.pt | epoch 1, step 100
ep1-ba100 | ep*-ba* | epoch 1, step 100
gpt--val_loss=2.31-step=1000-consumed_samples=8000.0-last.ckpt | gpt--val_loss=*-step=*-consumed_samples=*-last.ckpt | step 1000, val_loss=2.31
020000 | * | number 20000
model_1M.pt | model_*.pt | number 1000000
model_1.5M.pt | model_*.pt | number 1500000
model_2e5.pt | model_*.pt | number 200000
step_2e5.pt | step_*.pt | step 200000
ppo_1M_steps.zip | ppo_*_steps.zip | step 1000000
model_1.5.pt | model_*.pt | -
9f2e5 | 9f2e5 | -
"""  # noqa: E501
"""Names, what they have in common with others of their series, and their fields."""

NOTHING = [
    *(
        "last.ckpt",
        ".",
        "model-00001-of-00004.safetensors",
        "fold1.pth",
        "seed_1.pth",
        "dropout_0.5.pth",
        "yolov5s.pt",
    ),
    *("model_v2.pt", "mp_rank_00", "consolidated.03.pth", "random_states_2.pkl", "rng_state_1.pth"),
    *("custom_checkpoint_0.pkl", "dist_optim.1.pt", "model.pt.2", "model_optim_rng_dp3.pt", "model_s4.pth"),
    *("model_tp1.pt", "layer_00-model_03-model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    *("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "llama-3.1.keras"),
    *("model-v1.5.keras", "best_model.keras"),
]

DIFFERENT = [
    ("resnet18_epoch_9.pth", "resnet50_epoch_9.pth"),
    ("fold1_ep3.pth", "fold2_ep3.pth"),
    ("e1_model_3.pt", "e2_model_3.pt"),
    ("s1_epoch_3.pth", "s2_epoch_3.pth"),
    ("lr_0.1_epoch_3.pt", "lr_0.01_epoch_3.pt"),
    ("seed_1_epoch_3.pt", "seed_2_epoch_3.pt"),
    ("model-00001-of-00002.bin", "model-00002-of-00002.bin"),
]


def told(name: str) -> str:
    """Return a name as the table has it."""
    fields = parse_name(name)
    counts = {"epoch": fields.epoch, "step": fields.step, "number": fields.number, "saved": fields.saved_at}
    said = [f"{key} {value}" for key, value in counts.items() if value is not None]
    said += [f"{metric}={value:g}" for metric, value in fields.metrics.items()]
    return f"{name} | {fields.blank} | {', '.join(said) or '-'}"


def test_fields() -> None:
    lines = [line for line in RECOGNISED.splitlines() if line and line[0] != "#"]
    assert len(lines) > 150
    assert [told(line.partition(" | ")[0]) for line in lines] == lines


def test_a_name_without_fields_is_its_own_series() -> None:
    for name in ("", *NOTHING):
        fields = parse_name(name)
        assert fields.blank == name
        assert (fields.epoch, fields.step, fields.number, fields.saved_at) == (None,) * 4, name


def test_the_best_says_so() -> None:
    best = ["best.pth", "ckpt_best.pt", "model_best_epoch_3.pth", "checkpoint.best_loss_3.11.pt"]
    assert [name for name in (*best, "bestiary_3.pt", "model_3.pt") if is_named_best(name)] == best


def test_siblings_are_different_series() -> None:
    assert [pair for pair in DIFFERENT if len({parse_name(name).blank for name in pair}) == 1] == []


def test_a_number_that_no_integer_holds_is_no_field() -> None:
    fields = parse_name(f"model_epoch_{'9' * 5000}.pth")
    assert (fields.blank, fields.epoch) == ("model_epoch_*.pth", None)


@given(st.text())
def test_any_text_is_a_name(name: str) -> None:
    fields = parse_name(name)
    assert fields.blank.count("*") >= name.count("*")


@given(
    st.text(st.sampled_from("abcmodelnet_-."), max_size=12),
    st.sampled_from(["epoch", "Epoch_", "epoch=", "_ep_", "-ep-"]),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.sampled_from(["", ".pth", "_step_7.pt", "-val_loss=0.5.ckpt", "_fold2.pt"]),
)
def test_names_that_differ_in_the_epoch_alone_are_one_series(before, key, one, other, behind) -> None:
    assume("total" not in before)  # what follows "total" says how many there are
    first, second = (parse_name(f"{before}{key}{epoch}{behind}") for epoch in (one, other))
    assert first.blank == second.blank
    assert (first.epoch, second.epoch) == (one, other)


def test_a_metric_that_is_none_stays_in_its_series() -> None:
    fields = parse_name("weights.05-nan.h5")
    assert (fields.blank, fields.epoch) == (parse_name("weights.06-0.87.h5").blank, 5)
    assert math.isnan(fields.metrics["value"])


@given(
    st.sampled_from(["model.", "weights.", "weights-", "model_", "cp-", "ckpt-", "checkpoint.", ""]),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    st.integers(1, 5),
    st.floats(-1e3, 1e3, allow_nan=False),
    st.integers(1, 6),
    st.sampled_from(["-", "_"]),
    st.sampled_from([".keras", ".h5", ".hdf5", ".weights.h5"]),
)
def test_names_of_keras_callback(stem, epochs, width, value, digits, separator, suffix) -> None:
    """Whatever a template makes of epoch and metric, they are told again, and make one series."""
    one, other = (
        parse_name(f"{stem}{epoch:0{width}d}{separator}{value:.{digits}f}{suffix}") for epoch in epochs
    )
    assert (one.epoch, other.epoch) == epochs
    assert one.metrics == other.metrics == {"value": float(f"{value:.{digits}f}")}
    assert one.blank == other.blank
    assert (one.position < other.position) == (epochs[0] < epochs[1])


@given(
    st.text(st.sampled_from("abcmodelnetv_-."), max_size=12),
    st.decimals(0, 1000, places=2, allow_nan=False),
    st.sampled_from(["", "-half", "_best", "-final"]),
    st.sampled_from([".keras", ".weights.h5", ".h5", ".pth", ".ckpt", ""]),
)
def test_a_decimal_is_neither_an_epoch_nor_a_position(stem, decimal, behind, suffix) -> None:
    fields = parse_name(f"{stem}{decimal}{behind}{suffix}")
    assert (fields.epoch, fields.step) == (None, None)
    assert fields.number is None


def test_hostile_names_take_linear_time() -> None:
    parts = (
        "1",
        "a1",
        "epoch_",
        "0.1-",
        "a_",
        "2026-01-31_",
        "e1-",
        "1_of_",
        ".",
        "_",
        "loss_",
        "1.1e-1",
        "-_",
    )
    for part in parts:
        name = (part * (1 << 14))[: 1 << 14]
        before = time.process_time()
        parse_name(name + "1")
        assert time.process_time() - before < 2, part  # a catastrophic expression takes hours


def test_metric_that_is_no_number_is_told_as_such() -> None:
    fields = parse_name("epoch=2-val_loss=nan.ckpt")
    assert fields.blank == parse_name("epoch=3-val_loss=0.5.ckpt").blank
    assert math.isnan(fields.metrics["val_loss"])


@given(
    st.sampled_from(["val_wer", "BLEU-4", "top-5-acc", "recall@10", "fid50k", "neg_val_loss", "mAP_0.5"]),
    st.lists(st.decimals(-9, 9, places=2, allow_nan=False), min_size=2, max_size=5),
    st.sampled_from(["{metric}={value}-epoch={epoch}.ckpt", "m-epoch={epoch}-{metric}={value}.pt"]),
)
def test_values_of_a_metric_never_part_a_series(metric: str, values, template: str) -> None:
    names = [template.format(metric=metric, value=value, epoch=at) for at, value in enumerate(values)]
    assert len({parse_name(name).blank for name in names}) == 1
    assert [dict(parse_name(name).metrics) for name in names] == [{metric: float(value)} for value in values]
