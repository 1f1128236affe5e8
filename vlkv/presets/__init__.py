"""Published models by name, as configs: `vlkv.presets["llava-1.5-7b"]`, for planning and for timing without weights.

    params = vlkv.init(vlkv.presets["llava-1.5-7b"], jax.random.key(0), mesh, dtype=jnp.bfloat16)

Each is the part that matters of the `config.json` as published, read as a folder's would be; an end of sequence that
stands in `generation_config.json` only is written into it. One file per family.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.presets import internvl, llava, qwen2_vl, text


class Presets:
    """Configs by name, read when they are asked for."""

    def __init__(self, raw: Mapping[str, dict[str, Any]], added: Mapping[str, Mapping[str, int]]) -> None:
        self.raw = raw
        self.added = added  # by name: ids of the tokenizer's added tokens, where the config names none

    def __getitem__(self, name: str) -> ModelConfig:
        """The config; InputError for a name that is not there."""
        if name not in self.raw:
            near = difflib.get_close_matches(str(name), self.raw, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self.raw)}"
            raise InputError(f"no preset {name!r}: {hint}")
        return ModelConfig.from_hf(self.raw[name], added=self.added.get(name))

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


presets = Presets({**llava.RAW, **qwen2_vl.RAW, **internvl.RAW, **text.RAW}, internvl.ADDED)
