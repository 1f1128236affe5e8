"""What is special about Qwen3-VL with experts; `test_every_family.py` has the rest."""

from __future__ import annotations

import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import answer, raw_of
from tests.families.common_qwen import apart, rewrite_experts
from tests.models import same
from tests.parity.conftest import torch
from vlkv.families import config_from_hf

KIND = "qwen3_vl_moe"


def test_the_routers_choice_does_not_depend_on_rounding(saved):
    """Else parity would be a matter of luck."""
    seen, (model, _, _, rows) = [], saved(KIND)
    routers = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[0])) for router in routers]
    for row in rows:
        answer(model, row)
    for hook in hooks:
        hook.remove()
    best = torch.cat(seen).sort(descending=True).values
    active = model.config.text_config.num_experts_per_tok
    assert len(seen) == 3 * len(rows) and (best[:, active - 1] - best[:, active]).min() > 1e-4


def test_single_experts_become_one_tensor_in_orbax(saved, tmp_path):
    rewrite_experts(apart, saved(KIND), tmp_path / "apart")
    made = convert(tmp_path / "apart", tmp_path / "orbax", format="orbax", progress=False)
    same(saved(KIND).params, vlkv.load_params(made))


def test_an_expert_that_is_missing_is_named(saved, tmp_path):
    lost = "layers.2.mlp.experts.4.up"

    def less(key, x):
        return {name: part for name, part in apart(key, x).items() if lost not in name}

    rewrite_experts(less, saved(KIND), tmp_path / "apart")
    with pytest.raises(vlkv.InputError, match=r"missing key .*layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        vlkv.load_params(tmp_path / "apart")
    rewrite_experts(lambda key, x: {key: x[:, :-1]}, saved(KIND), tmp_path / "short")
    with pytest.raises(vlkv.InputError, match=r"experts\.\w+ has shape"):
        vlkv.load_params(tmp_path / "short")


@pytest.mark.parametrize("kind", [KIND, "qwen3_5"])
def test_the_head_is_tied_only_by_the_outer_config(saved, kind):
    raw = raw_of(saved(kind).folder)
    raw["text_config"]["tie_word_embeddings"] = True
    assert not config_from_hf(raw).decoder.tied
    assert config_from_hf(raw | {"tie_word_embeddings": True}).decoder.tied
