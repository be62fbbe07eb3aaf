"""Names and layouts by a map file: what it makes of tensors and their tree, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpttool import UsageError, open_checkpoint
from ckpttool.containers.toml import parse_toml
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.map_edits import rename_by_map
from ckpttool.weights.pairing.map_file import parse_map
from ckpttool.weights.pairing.pair_up import PairingOptions, pair_up
from tests.support.checkpoints import numbers
from tests.support.contents import arrays, content_of, made_of
from tests.support.tensors import Array

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "map.md"
EXAMPLES = dict(re.findall(r"^```toml\n# ([\w-]+\.toml)\n(.*?)^```", DOCS.read_text("utf-8"), re.M | re.S))


def mapped(content: Content, text: str) -> tuple[Content, list[str]]:
    return rename_by_map(content, parse_map("map.toml", parse_toml(text)))


def by_map(weights: Mapping[Any, Array], text: str, **known: Any) -> dict[str, Array]:
    return arrays(mapped(made_of(weights, **known)[0], text)[0])


def numpy_of(state: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: one.detach().numpy() for name, one in state.items()}


def test_names_with_stars() -> None:
    held = {"layers.0.w": numbers(2), "layers.1.w": numbers(3), "head": numbers(4)}
    content, notes = mapped(made_of(held)[0], '[names]\n"layers.*.w" = "blocks.*.weight"\n')
    assert list(arrays(content)) == ["blocks.0.weight", "blocks.1.weight", "head"]
    assert np.array_equal(content.tensors[1].array(), numbers(3))
    assert notes == ["by the map: 2 tensors renamed"]


def test_names_may_be_swapped() -> None:
    found = by_map({"a": numbers(2), "b": numbers(3)}, '[names]\na = "b"\nb = "a"\n')
    assert {name: array.size for name, array in found.items()} == {"b": 2, "a": 3}


def test_paths_keep_the_number_of_their_parts() -> None:
    content, _ = made_of({("conv", "kernel"): numbers(2), "flat.name": numbers(3)})
    made, _ = mapped(content, '[names]\n"conv.kernel" = "stem.conv.weight"\n"flat.name" = "a.b"\n')
    assert [one.path for one in made.tensors] == [("stem", "conv", "weight"), ("a.b",)]


RULES = [
    ("dense", "", (3, 4), lambda a: a.T),
    ("transpose", "", (2, 3, 4), lambda a: a.transpose(2, 1, 0)),
    ("permute", "axes = [2, 0, 1]", (2, 3, 4), lambda a: a.transpose(2, 0, 1)),
    ("permute", "axes = [2, 0, 1]\ninverse = true", (2, 3, 4), lambda a: a.transpose(1, 2, 0)),
    ("conv", "", (2, 3, 4, 5), lambda a: a.transpose(3, 2, 0, 1)),
    ("conv", "inverse = true", (5, 4, 2, 3), lambda a: a.transpose(2, 3, 1, 0)),
    (
        "flatten",
        "shape = [2, 3, 4]",
        (24, 5),
        lambda a: a.reshape(3, 4, 2, 5).transpose(3, 2, 0, 1).reshape(5, 24),
    ),
    (
        "flatten",
        "shape = [2, 3, 4]\ninverse = true",
        (5, 24),
        lambda a: a.reshape(5, 2, 3, 4).transpose(2, 3, 1, 0).reshape(24, 5),
    ),
]


def test_rules() -> None:
    for rule, more, shape, expected in RULES:
        held = numbers(*shape)
        found = by_map({"a": held}, f'[[tensor]]\nfrom = "a"\nto = "b"\nrule = "{rule}"\n{more}\n')
        assert np.array_equal(found["b"], expected(held)), rule


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 3))
@settings(max_examples=30)
def test_what_is_split_is_joined_again(sizes: list[int], width: int) -> None:
    held = numbers(sum(sizes), width)
    parts = [f"p{at}" for at in range(len(sizes))]
    split = f'[[tensor]]\nfrom = "a"\nto = {parts}\nsplit = 0\nsizes = {sizes}\n'
    found = by_map({"a": held}, split)
    assert [found[part].shape[0] for part in parts] == sizes
    assert np.array_equal(np.concatenate(list(found.values())), held)
    assert np.array_equal(by_map(found, f'[[tensor]]\nfrom = {parts}\nto = "a"\njoin = 0\n')["a"], held)


def test_transposed_first_and_cut_then() -> None:
    fused = numbers(4, 12)  # GPT-2's Conv1D: (in, q + k + v)
    text = '[[tensor]]\nfrom = "c_attn"\nto = ["q", "k", "v"]\nrule = "transpose"\nsplit = 0\n'
    found = by_map({"c_attn": fused}, text)
    assert all(
        np.array_equal(one, third.T) for one, third in zip(found.values(), np.split(fused, 3, 1), strict=True)
    )


def test_drop() -> None:
    held = {"a.n": numbers(2), "a.w": numbers(2), "b.n": numbers(2)}
    content, notes = mapped(made_of(held)[0], 'drop = ["*.n"]\n')
    assert list(arrays(content)) == ["a.w"] and notes == ["by the map: 2 tensors dropped"]


# Trees --------------------------------------------------------------------------------------------------


def test_the_tree_of_a_state_dict_follows(tmp_path: Path) -> None:
    shared, fused = torch.randn(3), torch.randn(6, 2)
    state = {"a": shared, "b": shared, "qkv": fused, "p": nn.Parameter(torch.ones(2))}
    torch.save({"model": state, "epoch": 4}, tmp_path / "m.pth")
    text = '[names]\n"model.a" = "model.x"\n"model.p" = "model.param"\n'
    text += '[[tensor]]\nfrom = "model.qkv"\nto = ["model.q", "model.k", "model.v"]\nsplit = 0\n'
    with open_checkpoint(tmp_path / "m.pth") as opened:
        content, _ = mapped(content_of(opened), text)
        names = ["model.x", "model.b", "model.q", "model.k", "model.v", "model.param"]
        assert [one.name for one in content.tensors] == names
        tree = content.tree
        assert list(tree["model"]) == [name.removeprefix("model.") for name in names]
        assert tree["epoch"] == 4
        by_name = {one.name: one for one in content.tensors}
        assert tree["model"]["x"] is by_name["model.x"] and tree["model"]["b"] is by_name["model.b"]
        assert by_name["model.b"].shares_with == "model.x"
        assert tree["model"]["k"] is by_name["model.k"]
        assert np.array_equal(by_name["model.k"].array(), fused[2:4].numpy())
        assert by_name["model.param"] in tree["model"]["param"].args


def test_tied_tensors_that_a_table_parts_are_told(tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    torch.save({"a.weight": shared, "tied": shared, "free": torch.ones(2)}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as opened:
        made, notes = mapped(content_of(opened), '[names]\n"a.weight" = "z.weight"\n')
        assert [one.shares_with for one in made.tensors] == [None, "z.weight", None]
        assert notes == ["by the map: 1 tensor renamed"]
        text = '[[tensor]]\nfrom = "a.weight"\nto = "a.weight"\nrule = "dense"\n'
        made, notes = mapped(content_of(opened), text)
        assert [one.shares_with for one in made.tensors] == [None, None, None]
        assert notes == [
            "by the map: 1 tensor made by its tables",
            "2 tensors that shared bytes, but no longer all do: a.weight, tied",
        ]
        _, notes = mapped(content_of(opened), 'drop = ["a.weight"]\n')
        assert notes == ["by the map: 1 tensor dropped"]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))
        self.attention = nn.MultiheadAttention(2, 1)
        self.head = nn.Linear(2, 1)


@pytest.mark.parametrize("is_inside", [False, True])
def test_versions_of_modules_go_with_their_names(is_inside: bool, tmp_path: Path) -> None:
    state, front = Attending().state_dict(), "model." if is_inside else ""
    torch.save({"model": state, "epoch": 1} if is_inside else state, tmp_path / "m.pth")
    text = f'drop = ["{front}head.*"]\n[names]\n"{front}features.*" = "{front}stem.body.*"\n'
    text += f'[[tensor]]\nfrom = "{front}attention.in_proj_weight"\nsplit = 0\n'
    text += f'to = ["{front}q.weight", "{front}k.weight", "{front}v.weight"]\n'
    with open_checkpoint(tmp_path / "m.pth") as opened:
        content, notes = mapped(content_of(opened), text)
        tree: Any = content.tree["model"] if is_inside else content.tree
    versions = {"": 1, "stem.body": 1, "stem.body.0": 1, "stem.body.1": 1, "stem.body.2": 2}
    versions["attention.out_proj"] = 1
    found = {name: one["version"] for name, one in tree.state["_metadata"].items()}
    assert found == versions
    assert notes[1:] == ["versions of 6 modules in _metadata: 4 renamed with the tensors, 2 left out"]


def test_versions_stay_where_the_names_of_modules_do(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    torch.save(state, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as opened:
        content, notes = mapped(content_of(opened), '[names]\n"0.weight" = "0.kernel"\n')
        tree: Any = content.tree
    assert tree.state["_metadata"] == {name: dict(one) for name, one in state._metadata.items()}
    assert notes == ["by the map: 1 tensor renamed"]


def test_a_name_can_not_leave_its_dictionary(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "list": [torch.ones(3)]}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as opened:
        content = content_of(opened)
        with pytest.raises(UsageError, match="can't be moved out of 'model' to 'a'"):
            mapped(content, '[names]\n"model.*" = "*"\n')
        with pytest.raises(UsageError, match=r"list\.0: a map can't change a tensor outside dictionaries"):
            mapped(content, '[names]\n"list.0" = "list.1"\n')


# Refusals -----------------------------------------------------------------------------------------------

TABLE = '[[tensor]]\nfrom = "a"\nto = "c"\n'


def test_what_is_wrong() -> None:
    cases = [
        ('[names]\nx = "y"\n', "map.toml[names.\"x\"]: no tensor 'x'"),
        ('[names]\na = "b"\n', "map.toml: b: 'a' and 'b' would both get this name"),
        ('[names]\n"*" = "*c"\na = "d"\n', "map.toml[names.\"a\"]: no other tensor 'a'"),
        ('[names]\na = "c"\nb = "c"\n', "map.toml[names.\"b\"]: 'b' and 'a' both become 'c'"),
        ('drop = ["x.*"]\n', "map.toml[drop]: no tensor 'x.*'"),
        ("drop = 3\n", "map.toml[drop]: drop is 3 (a name, or a list of names)"),
        (TABLE + 'rule = "conv"\n', "map.toml[tensor 1]: a: 2 axes, not 3, 4, 5 (rule conv)"),
        (TABLE.replace('"a"', '["a", "x"]') + "join = 0\n", "map.toml[tensor 1]: no tensor 'x'"),
        (
            TABLE.replace('"a"', '["a", "b"]') + "join = 0\n",
            "map.toml[tensor 1]: a: shapes [4, 3], [2] (rule as-is)",
        ),
        (
            TABLE.replace('"c"', '["c", "d", "e"]') + "split = 0\n",
            "map.toml[tensor 1]: a: 4 rows for 3 equal parts (rule as-is)",
        ),
        (
            TABLE.replace('"c"', '["c", "d"]') + "split = 0\nsizes = [1, 2]\n",
            "map.toml[tensor 1]: a: shape [4, 3] for 1 + 2 rows (rule as-is)",
        ),
        (TABLE + "sizes = [4]\n", "map.toml[tensor 1]: sizes is [4] (with split = 0, one for each of 1)"),
        (
            TABLE + "inverse = true\n",
            'map.toml[tensor 1]: inverse is True (true or false, with rule = "conv", "flatten", "permute")',
        ),
        (TABLE + '[names]\nz = "c"\n', "map.toml[names.\"z\"]: no tensor 'z'"),
    ]
    for text, told in cases:
        with pytest.raises(UsageError, match=f"^{re.escape(told)}"):
            by_map({"a": numbers(4, 3), "b": numbers(2)}, text)


def test_weights_beside_an_optimizer_are_renamed_and_not_changed() -> None:
    held = {"a": numbers(4, 3), "optimizer.m": numbers(4, 3)}
    known = {"optimizer": "optimizer"}
    assert list(by_map(held, '[names]\na = "b"\n', **known)) == ["b", "optimizer.m"]
    for text in (TABLE + 'rule = "dense"\n', 'drop = ["a"]\n'):
        with pytest.raises(UsageError, match="a: the optimizer's state would no longer fit"):
            by_map(held, text, **known)


# The examples of the documentation ----------------------------------------------------------------------


def test_every_example_is_one_of_these() -> None:
    assert set(EXAMPLES) == {"into-in-proj.toml", "out-of-in-proj.toml", "llama.toml", "vit.toml"}


def test_query_key_and_value_are_in_proj() -> None:
    torch.manual_seed(1)
    whole = nn.MultiheadAttention(6, 2, batch_first=True)
    state = numpy_of({f"attn.{name}": one for name, one in whole.state_dict().items()})
    parts = by_map(state, EXAMPLES["out-of-in-proj.toml"])
    given_ = torch.randn(2, 5, 6)
    heads = []
    for part in "qkv":
        weight, bias = (torch.from_numpy(parts[f"attn.{part}_proj.{leaf}"]) for leaf in ("weight", "bias"))
        heads.append((given_ @ weight.T + bias).view(2, 5, 2, 3).transpose(1, 2))
    inner = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 5, 6)
    with torch.no_grad():
        expected = whole(given_, given_, given_, need_weights=False)[0]
        assert torch.allclose(whole.out_proj(inner), expected, atol=1e-6)
    back = by_map(parts, EXAMPLES["into-in-proj.toml"])
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)


def test_a_model_like_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 10}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    state = numpy_of(model.state_dict())
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    inner = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    held = {"rope.freqs": numbers(1), **{own: state[name] for own, name in names.items()}}
    for at in range(2):
        layer = f"model.layers.{at}"
        held |= {f"layers.{at}.{own}.weight": state[f"{layer}.{name}.weight"] for own, name in inner.items()}
        parts = [state[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        held[f"layers.{at}.attention.wqkv.weight"] = np.concatenate(parts)
    found = by_map(held, EXAMPLES["llama.toml"])
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], state[name]) for name in state)


def test_a_vision_transformer() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))
    fused = {f"vit.{name}": one for name, one in _timm(dict(model.vit.state_dict())).items()}
    held = {name.removeprefix("vit."): one for name, one in numpy_of(fused).items()}
    held |= {f"head.{name}": one for name, one in numpy_of(model.classifier.state_dict()).items()}
    found = by_map(held, EXAMPLES["vit.toml"])
    state = numpy_of(model.state_dict())
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], state[name]) for name in state)


def _timm(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict of transformers by timm's names, query, key and value in one."""
    words = {
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.o_proj": "attn.proj",
        "layernorm.": "norm.",
        "layers.": "blocks.",
    }
    parts: dict[str, list[torch.Tensor]] = {}
    made = {}
    for name, one in state.items():
        if match := re.fullmatch(r"layers\.(\d+)\.attention\.[qkv]_proj\.(\w+)", name):
            parts.setdefault(f"blocks.{match[1]}.attn.qkv.{match[2]}", []).append(one)
            continue
        for theirs, own in words.items():
            name = name.replace(theirs, own)
        made[name] = one
    return made | {name: torch.cat(held) for name, held in parts.items()}


def test_diff_finds_equal_what_a_map_made() -> None:
    torch.manual_seed(2)
    state = numpy_of({f"attn.{name}": one for name, one in nn.MultiheadAttention(4, 2).state_dict().items()})
    content, opened = made_of(state)
    told = parse_map("map.toml", parse_toml(EXAMPLES["out-of-in-proj.toml"]))
    made, _ = rename_by_map(content, told)
    other = made_of(arrays(made))[1]
    found = pair_up(opened, other, PairingOptions(mapping=told, rename=False))
    assert not found.removed and not found.added
    assert all(np.array_equal(one.a.tensor.array(), one.b.tensor.array()) for one in found.pairs)
