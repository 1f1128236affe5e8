"""Tiny random checkpoints made by transformers, perturbed so that a wrong use of any parameter changes the result."""

import importlib
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


class Later:
    """A module that is imported when a test uses it, because torch and transformers take seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("_"):  # pytest looks for some as it collects
            raise AttributeError(attribute)
        if find_spec(self._name) is None:
            pytest.skip(f"needs {self._name}: pip install -e .[test,parity]", allow_module_level=True)
        return getattr(importlib.import_module(self._name), attribute)


torch, transformers = Later("torch"), Later("transformers")

IMAGE_TOKEN = 99
VOCABULARY = 120
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def perturb(model, seed: int = 0) -> None:
    """Adds noise to every parameter, and makes attention and logits far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                # Larger queries and keys make attention far from uniform, so that masks and heads matter.
                gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
                parameter.copy_(gain * noise * parameter[0].numel() ** -0.5)
        model.get_output_embeddings().weight.mul_(2.0)


def text_config(kind: str = "llama", **changes):
    options = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **options | changes)


def make_llava(seed: int = 0, **changes):
    """A LLaVA with a four-layer tower (so that feature layer -2 is neither first nor last) and 16 vision tokens."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=28, patch_size=7
    )
    tied = changes.pop("tied", False)
    extra = {key: changes.pop(key) for key in list(changes) if key.startswith("vision_feature")}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text_config(tie_word_embeddings=tied, **changes),
        image_token_index=IMAGE_TOKEN, tie_word_embeddings=tied, **extra,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    perturb(model, seed)
    return model


def make_text(kind: str, seed: int = 0, **changes):
    if kind == "mistral":
        changes.setdefault("sliding_window", None)
    model = transformers.AutoModelForCausalLM.from_config(text_config(kind, **changes)).eval()
    perturb(model, seed)
    return model


@pytest.fixture(scope="session")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    model = make_llava()
    model.save_pretrained(folder)
    return model, folder


def save_tokenizer(folder) -> None:
    """A byte-level tokenizer of 260 tokens, which joins " w", and a chat template."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {
        byte: i + 3 for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"Ġw": len(vocabulary)}, merges=[("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
