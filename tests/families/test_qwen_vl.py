"""Qwen-VL: its tower and resampler written here in torch, its decoder as transformers' Qwen2, which has its shape."""

from __future__ import annotations

import json
import math

import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import NEW, ParityTests, Row, save_file
from tests.models import same
from tests.parity.conftest import perturb, text_config, torch, transformers
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf

START, IMAGE = 96, 98  # <img>, </img>, and the token of each vision token
WIDTH, INNER, SIDE, PATCH, HEADS, TOKENS = 256, 32, 80, 4, 4, 16
LENGTH = 60  # tokens that the decoder was trained on


class Resampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.pos_embed = torch.nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.kv_proj = torch.nn.Linear(INNER, WIDTH, bias=False)
        self.attn = torch.nn.MultiheadAttention(WIDTH, WIDTH // 128, batch_first=True)
        self.ln_q, self.ln_kv = (torch.nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))

    def forward(self, x):
        x, q = self.ln_kv(self.kv_proj(x)), (self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        return self.attn(q, x + resized(self.pos_embed, x.shape[1]), x)[0]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = (torch.nn.LayerNorm(INNER, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.attn.in_proj, self.attn.out_proj = torch.nn.Linear(INNER, 3 * INNER), torch.nn.Linear(INNER, INNER)
        self.mlp.c_fc, self.mlp.c_proj = torch.nn.Linear(INNER, 48), torch.nn.Linear(48, INNER)

    def forward(self, x):
        fused = self.attn.in_proj(self.ln_1(x)).unflatten(2, (HEADS, 3 * INNER // HEADS)).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(*fused.chunk(3, dim=-1))
        x = x + self.attn.out_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(torch.nn.functional.gelu(self.mlp.c_fc(self.ln_2(x))))


class Visual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, INNER, PATCH, PATCH, bias=False)
        self.positional_embedding = torch.nn.Parameter(torch.zeros(256, INNER))
        self.ln_pre, self.ln_post = torch.nn.LayerNorm(INNER, eps=1e-6), torch.nn.LayerNorm(WIDTH, eps=1e-6)
        self.transformer = torch.nn.Module()
        self.transformer.resblocks = torch.nn.Sequential(Block(), Block())
        self.attn_pool = Resampler()
        self.proj = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, pixels):
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = self.ln_pre(x + resized(self.positional_embedding, x.shape[1]))
        return self.ln_post(self.attn_pool(self.transformer.resblocks(x))) @ self.proj


def resized(table, count):
    side, stored = math.isqrt(count), math.isqrt(len(table))
    square = table.reshape(1, stored, stored, -1).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(square, (side, side), mode="bicubic", align_corners=False)
    return made.permute(0, 2, 3, 1).flatten(0, 2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qwen = transformers.Qwen2ForCausalLM(
            text_config("qwen2", hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4)
        )
        self.visual = Visual()

    def get_output_embeddings(self):
        return self.qwen.get_output_embeddings()

    def embed(self, ids, pixels):
        x = self.qwen.get_input_embeddings()(ids)
        if pixels is not None:
            made = self.visual(pixels).flatten(0, 1)
            x[0, (ids[0] == IMAGE).nonzero()[: len(made), 0]] = made  # an answer may hold the token too, as text
        return x

    def forward(self, input_ids, pixel_values=None, **options):
        return self.qwen(inputs_embeds=self.embed(input_ids, pixel_values), **options)

    def generate(self, input_ids, pixel_values=None, *, max_new_tokens, **options):
        """Without a cache: every step a whole forward pass."""
        for _ in range(max_new_tokens):
            logits = self(input_ids, pixel_values).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=1)
        return input_ids

    def grow_queries(self):
        """Log-n attention: a query's length may as well be changed before it is turned."""

        def hook(module, inputs, output):
            place = torch.arange(1, output.shape[1] + 1)
            factor = torch.where(place > LENGTH, torch.log(place) / math.log(LENGTH), 1.0)
            return output * factor[None, :, None]

        for layer in self.qwen.model.layers:
            layer.self_attn.q_proj.register_forward_hook(hook)

    def tensors(self) -> dict:
        """As the authors name them."""
        made = {f"transformer.visual.{key}": value for key, value in self.visual.state_dict().items()}
        found = self.qwen.state_dict()
        made |= {
            "transformer.wte.weight": found["model.embed_tokens.weight"],
            "lm_head.weight": found["lm_head.weight"],
        }
        made["transformer.ln_f.weight"] = found["model.norm.weight"]
        for i in range(2):
            ours, theirs = f"transformer.h.{i}.", f"model.layers.{i}."
            for leaf in ("weight", "bias"):
                parts = [found[f"{theirs}self_attn.{name}_proj.{leaf}"] for name in "qkv"]
                made[f"{ours}attn.c_attn.{leaf}"] = torch.cat(parts)
            names = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
                     "mlp.w1": "mlp.up_proj", "mlp.w2": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}  # fmt: skip
            for name, other in names.items():
                made[f"{ours}{name}.weight"] = found[f"{theirs}{other}.weight"]
        return {key: value.clone().contiguous() for key, value in made.items()}


def config_of(**changes) -> dict:
    visual = dict(heads=HEADS, image_size=SIDE, image_start_id=START, layers=2, mlp_ratio=1.5, output_dim=WIDTH,
                  patch_size=PATCH, width=INNER, n_queries=TOKENS)  # fmt: skip
    return dict(
        model_type="qwen", vocab_size=120, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        kv_channels=64, intermediate_size=160, layer_norm_epsilon=1e-6, seq_length=LENGTH, no_bias=True,
        eos_token_id=2, visual=visual,
    ) | changes  # fmt: skip


def write(model: Model, folder, **changes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(**changes)))
    save_file(model.tensors(), folder / "model.safetensors")


def prompts() -> list[Row]:
    """One picture, two, none."""
    rng = np.random.default_rng(0)

    def prompt(images: int, text: int) -> Row:
        ids = rng.integers(3, 90, text).tolist()
        for at in range(images):
            ids[2 * at + 1 : 2 * at + 1] = [START, *[IMAGE] * TOKENS, START + 1]
        pixels = rng.normal(size=(images, 3, SIDE, SIDE)).astype(np.float32)
        return Row(ids, {"pixel_values": list(pixels)} if images else {})

    return [prompt(1, 9), prompt(2, 12), prompt(0, 7)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen_vl")
    with torch.random.fork_rng():  # `perturb` adds to biases, which torch draws at random
        torch.manual_seed(0)
        model = Model().eval()
    perturb(model)
    model.grow_queries()
    write(model, folder)
    rows = prompts()
    assert max(len(row.ids) for row in rows) < LENGTH < max(len(row.ids) for row in rows) + NEW - 4  # queries grow
    return model, folder, vlkv.load_params(folder), rows


@pytest.mark.full
class TestParity(ParityTests):
    pass


def test_conversion_keeps_every_parameter(saved, tmp_path):
    _, folder, params, _ = saved
    convert(folder, tmp_path / "made", progress=False)
    same(params, vlkv.load_params(tmp_path / "made"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"visual": None}, "Qwen-VL is supported"),
        ({"rotary_pct": 0.5}, "rotary_pct=0.5"),
        ({"no_bias": False}, "no_bias=False"),
        ({"hidden_size": 128}, "visual.output_dim=256"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(config_of(**changes))


def test_prompts_beyond_the_trained_length_are_refused(saved):
    with pytest.raises(InputError, match=f"limit is {LENGTH}"):
        vlkv.Inputs.from_hf({"input_ids": [[5] * (LENGTH + 1)]}, saved[2].config)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_as_the_authors_write_them(tmp_path, chat):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    start = tokenizer.token_to_id("<img>")
    raw = config_of(vocab_size=300, seq_length=2048)
    raw["visual"]["image_start_id"] = start
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if chat:
        (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    processor = vlkv.load_processor(tmp_path)
    rng = np.random.default_rng(0)
    picture = PIL.Image.fromarray(rng.integers(0, 256, (30, 50, 3), dtype=np.uint8))
    inputs = processor([picture, picture], "What?")
    pads = "<imgpad>" * TOKENS
    text = f"Picture 1: <img>{pads}</img>\nPicture 2: <img>{pads}</img>\nWhat?"
    if chat:
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{text}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert inputs.tokens[0][inputs.valid[0]].tolist() == tokenizer.encode(text).ids
    assert inputs.is_vision.sum() == 2 * TOKENS
    grid = inputs.grid[0][inputs.is_vision[0]]
    assert grid.tolist() == [[i, y, x] for i in range(2) for y in range(4) for x in range(4)]
    # torchvision's Resize on PIL, ToTensor and Normalize.
    shown = np.asarray(picture.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)) / 255
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    np.testing.assert_allclose(inputs.pixels[0], ((shown - mean) / std).transpose(2, 0, 1), atol=1e-5)


def test_a_tiktoken_file_alone_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    (tmp_path / "qwen.tiktoken").write_text("")
    with pytest.raises(InputError, match=r"only qwen\.tiktoken: `vlkv convert` converts it"):
        vlkv.load_processor(tmp_path)
