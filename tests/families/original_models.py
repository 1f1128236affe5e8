"""LLaVA-1.5, MobileVLM-V2, EVE and Qwen-VL in torch under their authors' names; imported when a test makes a model."""

import math

import torch
import transformers

from tests.families.common_originals import (
    EVE_HEADS,
    EVE_WIDTH,
    INNER,
    LENGTH,
    PATCH,
    QWEN_HEADS,
    QWEN_IMAGE,
    TOKENS,
    WIDTH,
)
from tests.parity.conftest import VOCABULARY, text_config


class Original(torch.nn.Module):
    """A decoder of transformers behind embeddings of text and pictures; `vision` makes the latter."""

    def get_output_embeddings(self):
        return self.decoder.get_output_embeddings()

    def embed(self, ids, pixels):
        x = self.decoder.get_input_embeddings()(ids.clamp(max=VOCABULARY - 1))
        if pixels is not None:
            made = self.vision(pixels)
            x[0, (ids[0] == self.image).nonzero()[: len(made), 0]] = made  # an answer may hold the token too, as text
        return x

    def forward(self, input_ids, pixel_values=None, **options):
        return self.decoder(inputs_embeds=self.embed(input_ids, pixel_values), **options)

    def generate(self, input_ids, pixel_values=None, *, max_new_tokens, **options):
        """Without a cache: every step a whole forward pass."""
        for _ in range(max_new_tokens):
            logits = self(input_ids, pixel_values).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=1)
        return input_ids


def two_layers(width: int):
    return torch.nn.Sequential(torch.nn.Linear(width, 48), torch.nn.GELU(), torch.nn.Linear(48, 48))


class Ldp(torch.nn.Module):
    """LDPv2, as Sec. 3.2 of the paper draws it."""

    def __init__(self, width_in, width):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.mlp = torch.nn.Sequential(
            torch.nn.Linear(width_in, width), torch.nn.GELU(), torch.nn.Linear(width, width)
        )
        self.pool = torch.nn.AdaptiveAvgPool2d((12, 12))
        self.peg = torch.nn.Module()
        self.peg.peg = torch.nn.Sequential(torch.nn.Conv2d(width, width, 3, 1, 1, groups=width))

    def forward(self, x):
        square = self.mlp.mlp(x).transpose(1, 2).unflatten(2, (24, 24))
        pooled = self.pool(square)
        return (self.peg.peg(pooled) + pooled).flatten(2).transpose(1, 2)


class Llava(Original):
    """LLaVA-1.5 and MobileVLM-V2 with the names of the published checkpoints."""

    image = VOCABULARY  # behind the last token

    def __init__(self, kind: str):
        super().__init__()
        grid = 24 if kind == "mobilevlm" else 4
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=2 * grid,
            patch_size=2,
        )  # fmt: skip
        self.decoder = transformers.LlamaForCausalLM(text_config(max_position_embeddings=1024))
        self.tower = transformers.CLIPVisionModel(vision)
        self.projector = Ldp(16, 48) if kind == "mobilevlm" else two_layers(16)
        self.kind, self.tokens = kind, 144 if kind == "mobilevlm" else 16

    def vision(self, pixels):
        features = self.tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        return self.projector(features).flatten(0, 1)

    def tensors(self, *, tower: bool = True) -> dict:
        """The tensors under the authors' names, in which the CLIP tower has the level of transformers 4."""
        made = dict(self.decoder.state_dict())
        made |= {f"model.mm_projector.{key}": value for key, value in self.projector.state_dict().items()}
        if tower:
            made |= {f"model.vision_tower.vision_tower.{key}": value for key, value in self.tower_tensors().items()}
        return {key: value.clone() for key, value in made.items()}

    def tower_tensors(self) -> dict:
        found = self.tower.state_dict()
        return {key if key.startswith("vision_model.") else f"vision_model.{key}": v for key, v in found.items()}


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Sequential(torch.nn.LayerNorm(EVE_WIDTH), torch.nn.Linear(EVE_WIDTH, EVE_WIDTH, bias=False))
        self.kv = torch.nn.Sequential(
            torch.nn.LayerNorm(EVE_WIDTH), torch.nn.Linear(EVE_WIDTH, 2 * EVE_WIDTH, bias=False)
        )
        self.proj = torch.nn.Linear(EVE_WIDTH, EVE_WIDTH)

    def forward(self, query, x):
        """One query each [N, 1, D] for sets of patches [N, P, D]."""
        q, k, v = (
            y.unflatten(2, (EVE_HEADS, -1)).transpose(1, 2) for y in (self.q(query), *self.kv(x).chunk(2, dim=-1))
        )
        read = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=EVE_WIDTH**-0.5)
        return query + self.proj(read.transpose(1, 2).flatten(2))


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embedding = torch.nn.Conv2d(3, EVE_WIDTH, 14, 14, bias=False)
        self.class_embedding = torch.nn.Parameter(torch.zeros(EVE_WIDTH))
        self.split_embedding = torch.nn.Parameter(torch.zeros(EVE_WIDTH))
        self.local_attention, self.global_attention = Reader(), Reader()

    def forward(self, pixels):
        """One picture [4, S, S] to its tokens."""
        seen = torch.nonzero(torch.nn.functional.avg_pool2d(pixels[3:], 14)[0])
        (top, left), (bottom, right) = seen[0], seen[-1] + 1
        x = self.patch_embedding(pixels[None, :3])[0, :, top:bottom, left:right]
        lines, columns = x.shape[1] // 2, x.shape[2] // 2
        sets = [x[:, 2 * y : 2 * y + 2, 2 * z : 2 * z + 2].flatten(1).T for y in range(lines) for z in range(columns)]
        sets = torch.stack(sets)
        windows = self.local_attention(sets.mean(1, keepdim=True), sets)[:, 0]
        first = self.global_attention(self.class_embedding[None, None], windows[None])[0]
        rows = [torch.cat([row, self.split_embedding[None]]) for row in windows.split(columns)]
        return torch.cat([first, *rows])


class Eve(Original):
    image = VOCABULARY

    def __init__(self):
        super().__init__()
        self.decoder = transformers.LlamaForCausalLM(text_config())
        self.tower, self.projector = Tower(), two_layers(EVE_WIDTH)

    def vision(self, pixels):
        return torch.cat([self.projector(self.tower(picture)) for picture in pixels])

    def tensors(self) -> dict:
        made = dict(self.decoder.state_dict())
        made |= {f"model.mm_projector.{key}": value for key, value in self.projector.state_dict().items()}
        made |= {f"model.vision_tower.{key}": value for key, value in self.tower.state_dict().items()}
        made["model.vision_tower_compressor.input_layer.bias"] = torch.zeros(3)
        return {key: value.clone() for key, value in made.items()}


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
        fused = self.attn.in_proj(self.ln_1(x)).unflatten(2, (QWEN_HEADS, 3 * INNER // QWEN_HEADS)).transpose(1, 2)
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


class Qwen(Original):
    image = QWEN_IMAGE

    def __init__(self):
        super().__init__()
        self.decoder = transformers.Qwen2ForCausalLM(
            text_config("qwen2", hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4)
        )
        self.visual = Visual()

    def vision(self, pixels):
        return self.visual(pixels).flatten(0, 1)

    def grow_queries(self):
        """Log-n attention: a query's length may as well be changed before it is turned."""

        def hook(module, inputs, output):
            place = torch.arange(1, output.shape[1] + 1)
            factor = torch.where(place > LENGTH, torch.log(place) / math.log(LENGTH), 1.0)
            return output * factor[None, :, None]

        for layer in self.decoder.model.layers:
            layer.self_attn.q_proj.register_forward_hook(hook)

    def tensors(self) -> dict:
        made = {f"transformer.visual.{key}": value for key, value in self.visual.state_dict().items()}
        found = self.decoder.state_dict()
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
