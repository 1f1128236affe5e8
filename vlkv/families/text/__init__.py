"""Text models: Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Phi-3, Gemma 3, InternLM2; also decoders of other families."""

from vlkv.families.family import Family, TextModel
from vlkv.families.text.config import TextConfig
from vlkv.families.text.weights import names

FAMILY = Family(config=TextConfig, model=TextModel, names=names)
