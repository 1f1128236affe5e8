"""Plans: shapes and bytes against the families' own layouts and sums made by hand, and the real TPU compiler."""

import dataclasses
import io
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import vlkv
from tests.models import CONFIG
from vlkv import policies
from vlkv.analysis import cost
from vlkv.buckets import Buckets
from vlkv.cli import main
from vlkv.families import abstract
from vlkv.families.llava_next.inputs import Views
from vlkv.policies import AirCache, SnapKV
from vlkv.tools import planning
from vlkv.tools.planning import arithmetic, as_json, chips, programs
from vlkv.tools.planning.arithmetic import gib
from vlkv.tools.planning.questions import TEXT, question
from vlkv.towers.native import NativeConfig

GIB = 2**30


pytestmark = pytest.mark.usefixtures("shapes_for_arrays")


@pytest.mark.parametrize(("shape", "dtype", "expected"), [
    ((32, 128, 4096), "bfloat16", 32 * 128 * 4096 * 2),
    ((11008, 4096), "bfloat16", 11008 * 4096 * 2),
    ((100, 4304), "bfloat16", 104 * 4352 * 2),  # 13 times 8 lines, 34 times 128 lanes
    ((1, 17696, 32, 128), "bfloat16", 17696 * 32 * 128 * 2),
    ((16, 512, 1, 128), "bfloat16", 16 * 512 * 128 * 2),  # one head: the slots are the lines
    ((1, 128), "bfloat16", 2 * 128 * 2),  # two 16-bit lines share a word
    ((28, 4, 1), "int32", 4 * 1 * 128 * 4),  # 28 in the lanes, 1 in the lines
    ((4096,), "bfloat16", 4096 * 2),
    ((1,), "int32", 128 * 4),
    ((5, 0), "float32", 0),
])  # fmt: skip
def test_bytes_in_tiles(shape, dtype, expected):
    assert cost.array_bytes(shape, jnp.dtype(dtype), "tpu") == expected


# Name, prompt, pictures, tokens of one picture: of section 2 of the families' papers and transformers' processors.
PROMPTS = [
    ("llava-1.5-7b", 3072, 5, 576),
    ("llava-onevision-7b", 3072, 4, 730),
    ("llava-next-mistral-7b", 4864, 2, 2340),
    ("internvl2-8b", 3520, 13, 256),
    ("qwen2-vl-7b", 8192, 7, 34 * 34),
    ("vicuna-1.5-7b", 500, 0, 0),
]


@pytest.mark.parametrize(("name", "prompt", "pictures", "each"), PROMPTS)
def test_a_prompt_holds_as_many_pictures_as_fit(name, prompt, pictures, each):
    asked = question(vlkv.presets[name], batch=3, prompt=prompt)
    assert asked.pictures == pictures and asked.vision == pictures * each
    assert asked.text == prompt - asked.vision >= min(TEXT, prompt)
    assert asked.inputs.tokens.shape[0] == 3 and asked.inputs.max_vision >= asked.vision


def test_one_picture_alone_is_cut_into_tiles():
    asked = question(vlkv.presets["llava-onevision-7b"], batch=1, prompt=3000, pictures=1)
    assert (asked.pictures, asked.vision, asked.text) == (1, 2929, 71)
    with pytest.raises(vlkv.InputError, match="at least --prompt 2993"):
        question(vlkv.presets["llava-onevision-7b"], batch=1, prompt=1000)


def real_batch(config, batch, prompt, asked):
    tokens = np.full((batch, prompt), 7)
    tokens[:, 8 : 8 + asked.vision] = config.image_token
    count, c = batch * asked.pictures, config.vision
    if isinstance(c, NativeConfig):
        side = math.isqrt(asked.vision // asked.pictures) * c.merge
        grid = np.array([[1, side, side]] * count)
        arrays = {"pixel_values": np.zeros((count * side**2, c.patch_values), np.float32), "image_grid_thw": grid}
    elif config.family == "llava_onevision":
        pictures = Views(config)
        pictures.picture((480, 640), alone=asked.pictures == 1)
        pixels = [np.zeros((pictures.tiles, 3, 384, 384), np.float32)] * count
        arrays = {"pixel_values": pixels, "image_sizes": [(480, 640)] * count}
        arrays["batch_num_images"] = [asked.pictures] * batch
    else:
        arrays = {"pixel_values": np.zeros((count, 3, c.image_size, c.image_size), np.float32)}
    return vlkv.Inputs.from_hf({"input_ids": tokens, **arrays}, config, Buckets())


@pytest.mark.parametrize(
    ("name", "prompt", "batch"),
    [("llava-1.5-7b", 1300, 3), ("qwen2-vl-7b", 700, 3), ("qwen2.5-vl-7b", 1500, 2), ("glm-4.6v-flash", 700, 3),
     ("internvl2-8b", 900, 3), ("smolvlm2-256m", 900, 3), ("llava-onevision-7b", 3000, 2),
     ("llava-onevision-7b", 1600, 3)],
)  # fmt: skip
def test_a_batch_of_shapes_is_what_the_processor_makes(name, prompt, batch):
    config = vlkv.presets[name]
    asked = question(config, batch=batch, prompt=prompt)
    real = jax.tree.map(lambda x: (x.shape, x.dtype), real_batch(config, batch, prompt, asked))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), asked.inputs) == real


def job(name="llava-1.5-7b", batch=16, prompt=3072, policy=None, dtype="bfloat16", new_tokens=512):
    config = vlkv.presets[name]
    return arithmetic.Job(
        config=config, dtype=dtype, policy=policy or policies.Full(), batch=batch, new_tokens=new_tokens,
        question=question(config, batch=batch, prompt=prompt),
    )  # fmt: skip


def test_a_row_of_cache_by_hand():
    # LLaVA-1.5-7B: 32 layers, 32 key heads of 128, two bytes; the bucket of 5 pictures is 6 (3456 tokens), of text 192.
    full = 2 * 32 * 128 * 2 * (32 * 3648 + 32 * 512)
    assert job().row_bytes() == full
    kept = round(0.1 * 32 * 3456) + 32 * 192  # and up to 15 slots a layer to begin each on a tile
    compressed = 2 * 32 * 128 * 2 * ((kept + 32 * 15) // 16 * 16 + 32 * 512)
    assert job(policy=policies.AirCache(keep=0.1)).row_bytes() == compressed
    # Heads with different budgets share a column, so its slots are split, although four chips divide the heads.
    part = -(-((kept + 32 * 3) // 4 + 32 * 15) // 16) * 16
    split = 2 * 32 * 128 * 2 * (4 * part + 32 * 512)
    assert job(policy=policies.AdaKV(keep=0.1, scope="vision")).row_bytes(model=4) == split


def test_weights_by_hand():
    """Llama-7B: every matrix on two chips, half of each; the norms whole on both."""
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    matrices = 32 * layer + 2 * 32000 * 4096
    norms = (2 * 32 + 1) * 4096
    assert cost.weight_bytes(vlkv.presets["vicuna-1.5-7b"], "bfloat16", 1, "cuda") == 2 * (matrices + norms)
    assert cost.weight_bytes(vlkv.presets["vicuna-1.5-7b"], "float32", 2, "cuda") == 4 * (matrices // 2 + norms)
    assert size(abstract(vlkv.presets["vicuna-1.5-7b"])) == 4 * (matrices + norms)


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "topology", "batch", "expected"), [
    ("llava-1.5-7b", "v5e:1x1", 1, (1, 1)),
    ("qwen2-vl-7b", "v5e:4x4", 16, (4, 4)),
    ("qwen2-vl-7b", "v5e:16x16", 64, (64, 4)),
    ("qwen2-vl-7b", "v5e:16x16", 16, (16, 16)),  # more chips than key heads: slots are split
    ("internvl2-26b", "v5e:4x4", 16, (2, 8)),
    ("llava-1.5-7b", "v5p:2x2x1", 4, (4, 1)),
    # 30.5 billion parameters on four chips, which divide the key heads, would fill them: 14.2 of 15.75 GiB.
    ("qwen3-30b-a3b", "v5e:4x4", 16, (1, 16)),
])  # fmt: skip
def test_the_mesh_to_begin_with(name, topology, batch, expected):
    data, model, reason = arithmetic.choose_mesh(job(name, batch), chips.parse(topology))
    assert (data, model) == expected
    assert (f"data={data}, model={model}" if model < 16 or batch < 16 else "key heads do not divide") in reason


@pytest.mark.parametrize("store", [None, policies.KIVI(bits=8)], ids=["one method", "a composition"])
def test_what_would_fit(store):
    """A chip that needs 30 GiB, 8 of them weights: what is offered needs less than the 15.75 there are."""
    policy = policies.AirCache(keep=0.5)
    asked = job(policy=policy if store is None else policies.compose(policy, store=store), dtype="float32")
    where = chips.parse("v5e:4x4")
    weights = cost.weight_bytes(asked.config, "float32", 4, "tpu")
    found = list(arithmetic.remedies(asked, where, 4, 4, used=30 * GIB, weights=weights))
    per_row = (30 * GIB - weights) / 4
    assert found[0].startswith("--batch 4:") and weights + per_row <= where.chip.usable < weights + 2 * per_row
    assert any("32 chips" in text or "64 chips" in text for text in found)
    assert any("v4 (32.00 GiB each)" in text for text in found)
    small = list(arithmetic.remedies(asked, where, 4, 4, used=where.chip.usable + 2**20, weights=weights))
    assert any("--keep 0.3" in text for text in small) and any("--dtype bfloat16" in text for text in small)


TEXT_OF_A_PROGRAM = """\
  %all-reduce.1 = bf16[4,128]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=2, replica_groups=[4,4]<=[16], use=true
  %all-gather.7 = f32[8,16]{1,0} all-gather(%y), channel_id=3, replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
  %all-gather.8 = f32[8,16]{1,0} all-gather(%y), channel_id=3, replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%z), channel_id=4, source_target_pairs={{0,1}}
  ROOT %reduce-scatter.1 = f32[2,8]{1,0} reduce-scatter(%w), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}
  %splash_mqa.1 = (f32[2]{0}, bf16[2,64,128]{2,1,0}) custom-call(%a, %b, %c), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s8[1,1,1]{2,1,0}, bf16[2,1,64,128]{3,2,1,0}, bf16[2,64,128]{2,1,0}, bf16[2,64,128]{2,1,0}, \
s32[64,128]{1,0}, s32[8,64]{1,0}}, metadata={}
"""


def test_collectives_and_kernels_are_read_off_the_text():
    found = {c.kind: (c.count, c.bytes, c.sent) for c in programs.collectives(TEXT_OF_A_PROGRAM)}
    assert found == {
        "all-reduce": (1, 1024, 1536),  # 2 (n - 1) / n of 1024 bytes, n = 4
        "all-gather": (1, 512, 256),  # twice in the text, once on the channel; n = 2
        "collective-permute": (1, 32, 32),
        "reduce-scatter": (1, 64, 192),
    }
    kernel = programs.kernels(TEXT_OF_A_PROGRAM)
    operands = 1 + 3 * 2 * 64 * 128 * 2 + 64 * 128 * 4 + 8 * 64 * 4
    assert kernel == {"kernels": 1, "kernel_bytes": 8 + 2 * 64 * 128 * 2 + operands,
                      "kernel_flops": 4.0 * 2 * 64 * 64 * 128}  # fmt: skip


def test_experts_of_a_decode_step():
    assert cost.experts_read(job("qwen3-30b-a3b").config.decoder, 1) == pytest.approx(8 / 128)
    assert cost.experts_read(job("qwen3-30b-a3b").config.decoder, 4) == pytest.approx(1 - (120 / 128) ** 4)
    assert cost.experts_read(job().config.decoder, 1) == 1


def cut(name, own, shared=0):
    config = vlkv.presets[name]
    c = config.decoder
    layers, recurrent = own + shared, c.recurrent
    if recurrent is not None:
        recurrent = dataclasses.replace(recurrent, layers=tuple(i for i in recurrent.layers if i < layers))
    windows = c.windows[:layers]
    decoder = dataclasses.replace(c, layers=layers, windows=windows, shared_layers=shared, recurrent=recurrent)
    return dataclasses.replace(config, decoder=decoder)


# Layers, key heads and channels of layers that policies count, and of those with a ring, and its slots; layers with a
# state; and how many layers read pool and rings, which are more if some use what an earlier one has stored.
KINDS = [
    (("gemma-3-1b", 6), (1, 1, 256), (5, 1, 256, 512), 0, (1, 5)),
    (("gemma4-e2b", 5, 5), (1, 1, 512), (4, 1, 256, 512), 0, (2, 8)),
    (("gemma4-26b-a4b", 6), (1, 2, 512), (5, 8, 256, 1024), 0, (1, 5)),
    (("qwen3.5-9b", 8), (2, 4, 256), (0, 0, 0, 0), 6, (2, 0)),
]


@pytest.mark.parametrize(("layers", "full", "ring", "states", "readers"), KINDS, ids=[case[0][0] for case in KINDS])
def test_bytes_of_each_kind_of_layer_are_those_of_the_cache(layers, full, ring, states, readers):
    """Two rows, 10 % kept. Pool and rings have key heads of their own; rings and states do not depend on the prompt."""
    config = cut(*layers)
    asked = question(config, batch=2, prompt=8192, pictures=0)
    work = arithmetic.Job(config=config, dtype="bfloat16", policy=policies.SnapKV(keep=0.1, scope="all"), batch=2,
                          new_tokens=32, question=asked)  # fmt: skip
    model = abstract(config, jnp.bfloat16)
    run = partial(vlkv.prefill, policy=work.policy, new_tokens=32)
    cache, _ = jax.eval_shape(run, model, asked.inputs)
    parts = cost.cache_parts(cache, "cuda")
    assert sum(parts[name] for name in ("pool", "tail", "rings", "states")) == 2 * work.row_bytes()
    slot = 2 * 2 * 2 * full[1] * full[2]  # rows, keys and values, bytes
    kept = round(0.1 * full[0] * asked.inputs.tokens.shape[1])
    assert parts["pool"] == pytest.approx(kept * slot, abs=full[0] * 16 * slot)
    assert parts["tail"] == full[0] * 32 * slot and config.decoder.full_layers == full[0]
    assert parts["rings"] == 2 * 2 * 2 * math.prod(ring)
    # Heads of 128 x 128 numbers of 4 bytes; 3 tokens of 2 x 16 + 32 heads in bfloat16.
    assert parts["states"] == 2 * states * (32 * 128 * 128 * 4 + 3 * 64 * 128 * 2)
    read = (parts["pool"] + parts["tail"]) / full[0] * readers[0] + parts["rings"] / max(ring[0], 1) * readers[1]
    assert cost.read_of_cache(config.decoder.kinds, parts) == int(read)
    read, experts = (sum(x.size for x in jax.tree.leaves(part)) for part in cost.read_weights(model))
    given = model.decoder.layer_inputs
    table = 0 if given is None else sum(x.size for x in jax.tree.leaves(given.table))
    if config.decoder.tied:
        every = sum(x.size for x in jax.tree.leaves(model.decoder))
        assert read + experts == every - table - config.decoder.width  # and the final norm
    c = vlkv.presets[layers[0]].decoder
    assert (c.full_layers, len(c.sliding)) == {"gemma-3-1b": (4, 22), "gemma4-e2b": (3, 12), "gemma4-26b-a4b": (5, 25),
                                               "qwen3.5-9b": (8, 0)}[layers[0]]  # fmt: skip


def test_states_on_chips_that_do_not_divide_the_heads():
    """48 value heads over 16 key heads, of Qwen3.5-27B, on 32 chips: each has all."""
    c = vlkv.presets["qwen3.5-27b"].decoder
    memory, newest = 48 * 128 * 128 * 4, 3 * 2 * 128 * (2 * 16 + 48)
    assert cost.state_bytes(c, 2) == cost.state_bytes(c, 2, 16) == 48 * (memory + newest)
    assert cost.state_bytes(c, 2, 32) == 32 * 48 * (memory + newest)


def test_a_gpu_reads_the_weights_and_the_cache_in_prefill_and_in_a_step():
    made = planning.plan("qwen2-0.5b", topology="a100:1", prompt=200, batch=4, policy=policies.Full(), compare=False)
    run, c = made.runs[0], vlkv.presets["qwen2-0.5b"].decoder
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    weights = 2 * (c.layers * layer + c.vocab_size * c.width)  # the embedding is the head too
    for estimate in (run.prefill.estimate, run.decode.estimate):
        assert estimate.bytes == pytest.approx(weights + run.pool + run.tail, rel=0.001)
    entries = made.job.question.inputs.tokens.shape[1] + 64  # new tokens
    attention = 4 * c.layers * c.heads * c.head_dim * entries
    assert run.decode.estimate.flops == pytest.approx(4 * (weights + attention), rel=0.001)


needs_libtpu = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('libtpu')", reason="libtpu, a wheel for Linux only, is not installed"
)


@pytest.fixture(scope="module")
def tiny():
    """Four heads, two key heads and 128 channels each, so that nothing is padded but the smallest arrays."""
    decoder = dataclasses.replace(CONFIG.decoder, layers=2, head_dim=128, width=256, mlp_width=512, vocab_size=512)
    return dataclasses.replace(CONFIG, decoder=decoder)


def table(plan):
    text = io.StringIO()
    Console(file=text, width=100).print(planning.as_table(plan))
    rows = [line.split("│")[1:3] for line in text.getvalue().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in rows}


@pytest.fixture(scope="module")
def made(tiny):
    pytest.importorskip("libtpu")
    return planning.plan(tiny, topology="v5e:2x2", batch=4, prompt=300, new_tokens=16, policy=AirCache(keep=0.1))


@pytest.mark.full
def test_bytes_by_hand(tiny, made):
    """300 tokens: 9 pictures of 25 (a bucket of 12: 300 tokens) and 75 others (96); two bytes a number."""
    assert (made.data, made.model_axis) == (4, 1)
    full, compressed = made.runs
    for step in (full.prefill, full.decode, compressed.prefill, compressed.decode):
        assert step.program.arguments == pytest.approx(step.argument_bytes, rel=0.02)
    layers, number = 2, 2 * 2 * 128 * 2  # keys and values of a row on each chip: heads, channels, bytes
    assert full.pool == number * layers * math.ceil((300 + 96) / 16) * 16
    kept = round(0.1 * layers * 300) + layers * 96
    assert compressed.pool == number * ((kept + layers * 15) // 16 * 16)  # whole tiles of 16 for each layer
    assert full.tail == compressed.tail == number * layers * 16
    c = tiny.decoder
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    matrices = layers * layer + 2 * c.vocab_size * c.width
    assert 2 * matrices < full.weights < 2 * matrices * 1.2  # the tower, norms and biases are small and padded


@pytest.mark.full
@needs_libtpu
def test_what_does_not_fit_says_what_would(tiny):
    """A vocabulary of eight million fills a v5e: 2 x 8 GiB in float32, in bfloat16 half of that."""
    decoder = dataclasses.replace(tiny.decoder, vocab_size=2**23 + 2**20, layers=2)
    big = dataclasses.replace(tiny, decoder=decoder)
    made = planning.plan(big, topology="v5e:1x1", prompt=100, new_tokens=4, dtype="float32")
    (run,) = made.runs
    assert not made.fits and not run.fits and run.used > made.topology.chip.usable
    assert any("--dtype bfloat16" in text for text in run.remedies)
    assert any("chips with --mesh data=1,model=2" in text for text in run.remedies)
    lines = table(made)
    assert lines["prefill: time"] == lines["decode step: time"] == lines["tokens a second, all rows"] == "does not fit"


BAD = [
    (["llava-9"], "no preset"),
    (["llava-1.5-7b", "--topology", "v9:4x4"], "no chip 'v9'"),
    (["llava-1.5-7b", "--topology", "v5e:4"], "2 dimension"),
    (["llava-1.5-7b", "--topology", "v5e:"], "as in v5e:4x4"),
    (["llava-1.5-7b", "--mesh", "data=3,model=4"], "the topology has 16"),
    (["llava-1.5-7b", "--mesh", "4x4"], "expected data=D,model=M"),
    (["llava-1.5-7b", "--mesh", "data=8,model=2", "--batch", "12"], "multiple of 8"),
    (["llava-1.5-7b", "--prompt", "500"], "at least --prompt 640"),
    (["llava-1.5-7b", "--prompt", "8192"], "limit of 4096 positions"),
    (["llava-1.5-7b", "--batch", "0"], "--batch 0"),
    (["llava-1.5-7b", "--new", "-1"], "--new -1"),
    (["llava-1.5-7b", "--images", "3"], "3 images have 1728 tokens"),
    (["vicuna-1.5-7b", "--images", "1"], "no vision tower"),
    (["llava-1.5-7b", "--policy", "aircash"], "aircache"),
    (["llava-1.5-7b", "--topology", "v5e:16x16", "--batch", "3"], "give a multiple of 8"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_input_is_one_line(refused, monkeypatch, options, said):
    monkeypatch.setattr(planning.planning, "run", lambda *_, **__: pytest.fail("nothing may be compiled"))
    given = {"--topology": "v5e:4x4", "--prompt": "1300", "--batch": "16", "--new": "64"}
    given |= dict(zip(options[1::2], options[2::2], strict=True))
    refused(main, "plan", options[0], *(word for pair in given.items() for word in pair), says=said)


@pytest.mark.full
def test_the_cache_of_each_kind_of_layer():
    """Gemma 3 12B: what is printed for each kind."""
    plan = planning.plan("gemma-3-12b", topology="a100:1", prompt=4096, images=4,
                         policy=SnapKV(keep=0.1, scope="all"), compare=False)  # fmt: skip
    assert as_json(plan)["layers"] == {"full": 8, "sliding": 40, "shared": 0, "windows": [1024], "recurrent": 0}
    lines = table(plan)
    assert lines["cache of 40 layers with a window of 1024"] == "0.31 GiB"  # 320 MiB
    assert lines["cache of 8 full layers: prompt"] == gib(plan.runs[0].pool)
    assert lines["cache of 8 full layers: new tokens"] == "4.0 MiB"


JOB = dict(batch=2, prompt=100, new_tokens=4)


def printed(plan):
    console = Console(file=io.StringIO(), record=True, width=160)
    console.print(planning.as_table(plan))
    return console.export_text()


def test_a_gpu_plan_does_not_contradict_itself():
    said = []
    plan = planning.plan(CONFIG, topology="h100:1", policy=SnapKV(keep=0.2), report=said.append, **JOB)
    assert len(said) == 4 and all(line.startswith("computing the shapes of ") for line in said)
    text = printed(plan)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows and all(all(cells) for cells in rows), "no empty cell"
    named = {cells[0]: cells[1:] for cells in rows}
    usable = plan.topology.chip.usable
    assert named["fits"] == [f"with up to {gib(usable - run.used)} more" for run in plan.runs]
    assert named[f"needed of {gib(usable)}"] == [f"{gib(run.used)} + temporaries" for run in plan.runs]
    assert text.count("compile") == 1 and "without a compiler" in text and "by the compiler" not in text
    content = json.loads(json.dumps(planning.as_json(plan)))
    assert content["fits"] is None and {run["fits"] for run in content["runs"]} == {None}


def test_what_alone_is_too_large_does_not_fit():
    large = dataclasses.replace(CONFIG.decoder, vocab_size=2**30)
    plan = planning.plan(dataclasses.replace(CONFIG, decoder=large), topology="h100:1", **JOB)
    assert plan.fits is False and plan.runs[0].used > plan.topology.chip.usable
    assert "does not fit. Changes that would fit" in printed(plan)


@pytest.mark.parametrize("options", [{"whole": True}, {"quick": False}])
def test_options_of_the_compiler_are_refused(options):
    with pytest.raises(vlkv.InputError, match="nothing is compiled for GPUs, so leave out --generate and --thorough"):
        planning.plan(CONFIG, topology="h100:1", **options, **JOB)


def test_what_does_not_divide_is_computed_by_every_chip():
    """The demo model has an even number of key heads, so three chips compute as much as one."""
    one, two, three = (
        planning.plan(CONFIG, topology=f"h100:{count}", mesh=(1, count), **JOB).runs[0].prefill.estimate.flops
        for count in (1, 2, 3)
    )
    assert two == one / 2 and three == one
    assert "2 prompts of 100 tokens (1 image, " in printed(planning.plan(CONFIG, topology="h100:1", **JOB))
