"""Qwen3-VL: the model of Qwen2-VL with another tower, three outputs of which are added in the decoder."""

from __future__ import annotations

from vlkv.families.qwen2_vl.model import Qwen2Vl
from vlkv.families.qwen3_vl.tower import Qwen3VlTower


class Qwen3Vl(Qwen2Vl):
    """The mergers in `deep` are those of DeepStack; the k-th is added after the decoder's layer k."""

    tower = Qwen3VlTower
