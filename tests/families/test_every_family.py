"""What holds of every family: each record of a `common_*.py` is compared with transformers in float32."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families import common
from tests.families.common import Row, answer, joined, raw_of
from tests.models import same
from vlkv import policies

MODULES = [importlib.import_module(f"tests.families.{path.stem}") for path in Path(__file__).parent.glob("common_*.py")]
RECORDS = {name: record for module in sorted(MODULES, key=str) for name, record in module.RECORDS.items()}


def those(part):
    """The test's cases: records that have this part."""
    return pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if getattr(record, part)])


SECOND_FORMS = (  # another record has the same code, or only parts that others have
    "qwen3_vl", "qwen3_5", "qwen3_5_moe_text", "glm46v", "internvl3_5", "internvl3_5-6b", "internvl3_5_moe",
    "llava_next_video", "llava_next_mistral", "llava_video_frames", "gemma4-31b", "gemma4-mixed", "gemma4-full",
    "llava-mha-tied", "llava-last-layer", "llava-first-layer", "llama", "llama, tied", "qwen2", "mistral",
    "qwen3, bias", "qwen3_moe", "qwen3_moe, mlp", "qwen3_moe, no experts",
)  # fmt: skip


EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SECOND_FORMS)) for name in RECORDS]
)


@EVERY
def test_layer_outputs_and_logits(saved, name):
    record, (model, _, params, rows) = RECORDS[name], saved(name)
    blocks = (-1,) if record.attention else ()
    sides = (["left", "right"] * len(rows))[: len(rows)]
    answers = [answer(model, row) for row in rows]
    inputs, received = common.check_states(
        params, rows, answers, sides, within=record.within, before=record.before, blocks=blocks
    )
    config = params.config
    pictures = [
        token for token in (getattr(config, "image_token", None), getattr(config, "video_token", None)) if token
    ]
    ids = np.asarray(joined(rows, sides)["input_ids"])
    np.testing.assert_array_equal(inputs.is_vision[:, : ids.shape[1]], np.isin(ids, [x for x in pictures if x]))
    assert (inputs.grid[~inputs.is_vision] == -1).all()
    if record.attention:
        record.attention(saved(name), inputs, received)


@pytest.mark.default("[qwen2_vl]")
@pytest.mark.ci(
    *(f"[{name}]" for name in ("qwen2_vl", "glm4v", "gemma3", "gemma4-e2b", "llava_next", "smolvlm", "eve"))
)
@those("text_only")
def test_prompts_without_pictures(saved, name):
    model, _, params, rows = saved(name)
    text = next(row for row in rows if not any("pixel" in name for name in row.extra))
    rows = [Row(text.ids[:5], kinds(text, 5)), Row(text.ids, kinds(text, None))]
    inputs, _ = common.check_states(params, rows, [answer(model, row) for row in rows], before=RECORDS[name].before)
    assert inputs.pixels is None


def kinds(row: Row, count) -> dict:
    return {key: [value[0][:count]] for key, value in row.extra.items()}


# For their decoders or positions.
UNUSUAL = pytest.mark.ci(*(f"[{name}]" for name in (
    "qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe", "glm4v", "gemma3", "gemma4-e2b", "gemma4-26b-a4b", "llava", "llama",
    "mistral, window", "qwen2, window", "gemma3_text, window",
)))  # fmt: skip


@pytest.mark.full
@UNUSUAL
@those("new")
def test_greedy_tokens(saved, name):
    model, _, params, rows = saved(name)
    common.check_answers(params, rows, [answer(model, row, RECORDS[name].new) for row in rows], "left")


@pytest.mark.full
@UNUSUAL
@those("turns")
def test_a_later_turn(saved, name):
    """After a full cache, logits of the second turn and of a token after it are those of one prompt with both turns."""
    model, _, params, _ = saved(name)
    turns = RECORDS[name].turns()
    first, second = (
        vlkv.Inputs.from_hf(joined(rows, side), params.config)
        for rows, side in zip(turns, ("left", "right"), strict=True)
    )
    cache, _ = programs.prefill(params, first, policies.Full(), new_tokens=second.tokens.shape[1] + 1)
    cache, logits = programs.extend(params, cache, second)
    _, after = programs.decode_step(params, cache, np.arange(len(turns[0])) + 7)
    for number, rows in enumerate(zip(*turns, strict=True)):
        one = Row([7 + number], {key: [[0]] for key in rows[0].extra if key.endswith("token_type_ids")})
        theirs = answer(model, common.whole(*rows, one))[1]
        np.testing.assert_allclose(logits[number], theirs[-2], atol=2e-4)
        np.testing.assert_allclose(after[number], theirs[-1], atol=2e-4)
        assert theirs.std() >= 1


@EVERY
def test_every_copy_gives_the_same_parameters(saved, name, tmp_path):
    """Several files, other names and layouts, and what `vlkv convert` makes of each."""
    record, (model, folder, params, _) = RECORDS[name], saved(name)
    sources = {"source": folder}
    if record.write is None:
        model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
        same(params, vlkv.load_params(tmp_path / "sharded"))
    for other, write in record.copies.items():
        sources[other] = tmp_path / other
        write(saved(name), sources[other])
        same(params, vlkv.load_params(sources[other]))
    for other, source in sources.items():
        again = vlkv.load_params(convert(source, tmp_path / f"{other} converted", progress=False))
        same(params, again)
        assert again.config == params.config


@those("ties")
def test_a_head_that_is_the_embedding_table(saved, name, tmp_path):
    tied = common.save(RECORDS[name].make(tied=True), tmp_path, write=RECORDS[name].write).params
    assert tied.config.decoder.tied and tied.decoder.head is None
    assert not saved(name).params.config.decoder.tied


REFUSED = {
    f"{name}: {one.part}, {one.change}": (name, one) for name, record in RECORDS.items() for one in record.refused
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_is_not_honoured(saved, case):
    name, refused = REFUSED[case]
    common.check_refused(raw_of(saved(name).folder), refused)


UNFIT = {f"{name}, {says}": (name, change, says) for name, record in RECORDS.items() for change, says in record.unfit}


@pytest.mark.parametrize("case", UNFIT)
def test_arrays_that_do_not_fit(saved, case):
    name, change, says = UNFIT[case]
    prompts, (_, _, params, rows) = RECORDS[name].prompts, saved(name)
    batch = joined(prompts() if prompts else rows)
    changed = {key: value(np.array(batch[key])) if callable(value) else value for key, value in change.items()}
    with pytest.raises(vlkv.InputError, match=says):
        vlkv.Inputs.from_hf(batch | changed, params.config)


@those("row")
def test_positions_of_many_sizes(saved, name):
    """Of random pictures in random prompts: exactly transformers' rope index and its deltas."""
    (model, _, params, _), rng = saved(name), np.random.default_rng(1)
    for _ in range(25):
        common.check_positions(model, params, RECORDS[name].row(rng), Row([3, 4, 5]))
