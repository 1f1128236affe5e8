"""Compare a checkpoint with transformers: logits of prompts with and without an image, and greedy tokens.

The same arrays go into both, so what is compared is the model: its weights, its tower and its decoder. Float32 logits
may differ by rounding only. Our bfloat16 logits may differ from transformers' float32 logits by twice as much as
transformers' own bfloat16 logits do. Tokens may differ where the two most likely ones are closer than that; both follow
the rules of `generation_config.json`, such as a penalty on repetitions. Needs torch and transformers.

  vlkv verify mini
  vlkv verify converted --reference original --dtype float32
  vlkv verify llava-hf/llava-1.5-7b-hf --record
"""

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageDraw
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.decoder import Attend, attend_to_prompt, recur_over_prompt
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.files import one_line
from vlkv.generation.decode import check_room
from vlkv.generation.generate import generate
from vlkv.generation.prompt import forward
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.processing import Processor
from vlkv.processing.prompts import MARKS, occurrences
from vlkv.terminal import progress_bar
from vlkv.tools.commands import verified

DTYPES = ("float32", "bfloat16")
_ROUNDING = 5e-3  # tolerance for float32 sums in another order, relative to the reference's standard deviation
_QUESTION = "What is shown here? Describe its shapes and colours."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv verify`."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, a hub id, or mini")
    parser.add_argument("--reference", metavar="DIR", help="the folder that transformers loads, if MODEL was converted")
    parser.add_argument("--image", metavar="FILE", help="image to use (default: a generated one)")
    parser.add_argument("--prompt", default=_QUESTION, metavar="TEXT", help="the question (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="greedy tokens (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the weights (both)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    record = "add a line to the verified checkpoints in docs/models.md"
    parser.add_argument("--record", action="store_true", help=record)


def run(args: argparse.Namespace) -> Any:
    """The comparison as a table or for JSON; raises InputError if the models differ."""
    if args.record:
        verified.find_table()  # before the minutes of the comparison
    folder = loading.resolve(args.model)
    processor = loading.load_processor(folder)
    batches = _batches(processor, args.image, args.prompt)
    for batch in batches.values():
        check_room(processor.config, Inputs.from_hf(batch, processor.config, processor.buckets), args.tokens)
    dtypes = dict.fromkeys(("float32", *args.dtype))
    rows, first = [], None
    with progress_bar("comparing", len(batches) * (len(dtypes) + len(args.dtype))) as advance:
        advance(0, "loading transformers and the model", left=False)
        theirs = Reference(args.reference or folder, processor.config.family, vision=processor.pictures is not None)
        wanted: dict[str, dict[str, Answer]] = {dtype: {} for dtype in dtypes}
        for dtype, name in itertools.product(dtypes, batches):
            advance(0, f"transformers in {dtype}: {name}")
            wanted[dtype][name] = theirs.answer(batches[name], args.tokens, dtype)
            advance()
        for dtype in args.dtype:
            advance(0, f"reading the weights in {dtype}", left=False)
            params = loading.load_params(folder, dtype=dtype)
            for name, batch in batches.items():
                advance(0, f"compiling and comparing in {dtype}: {name}")
                inputs = Inputs.from_hf(batch, params.config, processor.buckets)
                row = compare(params, inputs, wanted[dtype][name], wanted["float32"][name], args.tokens)
                rows.append({"prompt": name, "dtype": dtype, **row})
                if not row["passed"] and first is None:
                    first = f"{name}, {dtype}: {first_difference(params, inputs, wanted[dtype][name])}"
                advance()
    report = {
        "model": str(args.model), "family": processor.config.family, "passed": first is None,
        "device": jax.devices()[0].device_kind, "machine": platform.machine(),
        "versions": {name: version(name) for name in ("vlkv", "jax", "torch", "transformers")}, "rows": rows,
    }  # fmt: skip
    print(json.dumps(report, indent=2)) if args.json else _print(report)
    if first is not None:
        raise InputError(f"{args.model} differs from transformers: {first}")
    if args.record:
        verified.record(report, folder)
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Results of transformers for one prompt."""

    logits: Float[np.ndarray, "T vocab"]
    hidden: tuple[Float[np.ndarray, "T D"], ...]  # input of each layer, then the last output after its norm
    tokens: list[int]
    steps: Float[np.ndarray, "S vocab"]  # logits from which each token was chosen, after the checkpoint's rules


class Reference:
    """A checkpoint in transformers, without code from the checkpoint."""

    def __init__(self, folder: Any, family: str, *, vision: bool) -> None:
        try:
            import torch  # noqa: PLC0415 (heavy, and only this command needs them)
            import transformers  # noqa: PLC0415
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: PLC0415
        except ImportError:
            raise InputError("vlkv verify compares with transformers: pip install 'vlkv[parity]'") from None
        if family not in CONFIG_MAPPING_NAMES:
            raise InputError(f"transformers has no class of its own for model_type {family}: nothing to compare with")
        transformers.utils.logging.disable_progress_bar()  # it writes hundreds of characters into logs
        kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
        try:
            self.model = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        except Exception as error:  # transformers raises many kinds
            raise InputError(f"{folder}: transformers cannot load it ({one_line(error)[:200]})") from None
        # With the folder's rules, such as a penalty on repetitions, which we apply too. The comparison needs the most
        # likely tokens, and as many of them for every prompt.
        unset = dict.fromkeys(("eos_token_id", "max_length", "temperature", "top_k", "top_p"))
        self.model.generation_config.update(
            do_sample=False, pad_token_id=0, num_beams=1, num_return_sequences=1, **unset
        )
        self.torch = torch

    def answer(self, batch: Mapping[str, Any], new: int, dtype: str) -> Answer:
        """Runs one prompt in one dtype. The model is cast in place, so float32 must come first."""
        model = self.model.to(getattr(self.torch, dtype))
        known = inspect.signature(model.forward).parameters  # not the arrays that only this library uses
        arrays = {name: self._tensor(value) for name, value in batch.items() if name in known}
        ids = arrays["input_ids"]
        token = getattr(model.config, "image_token_id", None)
        for name in {"mm_token_type_ids", "token_type_ids"} & set(known):
            arrays[name] = (ids == (-1 if token is None else token)).long()
        with self.torch.no_grad():
            out = model(**arrays, output_hidden_states=True)
            generated = model.generate(**arrays, max_new_tokens=new, output_scores=True, return_dict_in_generate=True)
        return Answer(
            logits=out.logits[0].float().numpy(),
            hidden=tuple(state[0].float().numpy() for state in out.hidden_states),
            tokens=generated.sequences[0, ids.shape[1] :].tolist(),
            steps=np.stack([step[0].float().numpy() for step in generated.scores]),
        )

    def _tensor(self, value: Any) -> Any:
        tensor = self.torch.as_tensor(np.asarray(value))
        return tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor.long()


def compare(params: Model, inputs: Inputs, wanted: Answer, exact: Answer, new: int) -> dict[str, Any]:
    """Differences of logits and tokens from transformers for one prompt, and whether they are within tolerance.

    `wanted` is transformers' answer in the same dtype, `exact` that in float32.
    """
    valid = np.asarray(inputs.valid[0])
    ours = np.asarray(jax.jit(forward)(params, inputs)[0], np.float32)[valid]
    error, std = float(np.abs(ours - exact.logits).max()), float(exact.logits.std())
    allowed = max(_ROUNDING * std, 2 * float(np.abs(wanted.logits - exact.logits).max()))
    output = generate(params, inputs, sampling=Greedy(max_new_tokens=new, stop=()))
    tokens = np.asarray(output.tokens)[0].tolist()
    same = next((i for i, pair in enumerate(zip(tokens, wanted.tokens, strict=True)) if len(set(pair)) > 1), new)
    margin = 0.0 if same == new else float(wanted.steps[same][wanted.tokens[same]] - wanted.steps[same][tokens[same]])
    passed = bool(error <= allowed and margin <= 2 * allowed)
    logits = {"logit_error": error, "allowed": allowed, "logit_std": std}
    return {**logits, "tokens": same, "of": new, "margin": margin, "passed": passed}


def first_difference(params: Model, inputs: Inputs, wanted: Answer) -> str:
    """A phrase like "first at decoder layer 3": the first part of the model whose output differs from transformers.

    If no hidden states differ, the phrase names the output head or decoding.
    """
    valid, is_vision = np.asarray(inputs.valid[0]), np.asarray(inputs.is_vision[0])
    states = [np.asarray(state[0], np.float32)[valid] for state in _states(params, inputs)]
    is_vision, layers = is_vision[valid], len(params.decoder.layers)
    rounding = _ROUNDING if params.decoder.embedding.weight[...].dtype == jnp.float32 else 2**-4
    names = [f"decoder layer {i}" for i in range(layers - 1)] + [f"decoder layer {layers - 1} or the last norm"]
    parts = [
        ("the embedding of text", states[0][~is_vision], wanted.hidden[0][~is_vision]),
        ("the vision tower or the projector", states[0][is_vision], wanted.hidden[0][is_vision]),
        *zip(names, states[1:], wanted.hidden[1:], strict=True),
    ]
    for name, ours, theirs in parts:
        if theirs.size and np.abs(ours - theirs).max() > rounding * theirs.std():
            return f"first at {name}"
    return "first at the output head, or while decoding"


@jax.jit
def _states(params: Model, inputs: Inputs) -> list[Float[Array, "B T D"]]:
    """The embeddings, the output of each layer, the last one after the norm."""
    embedded = params.embed(inputs)

    def note(i: int, states: tuple[Array, ...], x: Array) -> tuple[tuple[Array, ...], Array, None]:
        mixed = params.decoder.add_features(embedded.added, i, x)
        # In transformers' hidden states a layer has mixed in its own inputs, but not the features of the tower.
        from_tower = embedded.added is not None and params.decoder.layer_inputs is None
        return (*states, x if from_tower else mixed), mixed, None

    first: tuple[Array, ...] = (embedded.x,)
    until = params.decoder.until(inputs.is_vision)
    attend: Attend[tuple[Array, ...]] = attend_to_prompt(params.decoder, inputs.valid, until)
    recur: Any = recur_over_prompt(inputs.valid)
    states, _ = params.decoder.walk(first, embedded.x, inputs.positions, attend, note, recur=recur)
    return [*states[:-1], params.decoder.norm(states[-1])]


def _batches(processor: Processor, image: str | None, question: str) -> dict[str, dict[str, Any]]:
    """Prompts in the form of transformers' processors: with an image, if the model has a tower, and without."""
    if image is not None and processor.pictures is None:
        raise InputError(f"--image {image}: this model has no vision tower; leave out --image")
    batches = {}
    if processor.pictures is not None:
        picture = image or _picture()
        reads = [processor.pictures.read(picture)]
        ids = processor.tokens(question, [picture], reads)[None]
        arrays = processor.pictures.batch(reads)
        batches["image"] = {"input_ids": ids, "attention_mask": np.ones_like(ids), **arrays}
    ids = processor.tokens(occurrences([MARKS["image"]]).sub("", question), [], [])[None]
    return {**batches, "text": {"input_ids": ids, "attention_mask": np.ones_like(ids)}}


def _picture() -> PIL.Image.Image:
    ramp = np.linspace(0, 255, 480 * 360).reshape(360, 480)
    image = PIL.Image.fromarray(np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=-1).astype(np.uint8))
    draw = PIL.ImageDraw.Draw(image)
    draw.ellipse((60, 40, 220, 200), fill="red", outline="black", width=4)
    draw.rectangle((260, 150, 430, 310), fill="blue")
    draw.line((20, 340, 460, 20), fill="yellow", width=8)
    return image


def _print(report: dict[str, Any]) -> None:
    reference = f"transformers {report['versions']['transformers']}, {report['device']}"
    table = Table("prompt", "dtype", "logit error", "allowed", "std of logits", "same tokens", "")
    table.title = f"{report['model']} ({report['family']}) against {reference}"
    for row in report["rows"]:
        error, allowed, std = f"{row['logit_error']:.2g}", f"{row['allowed']:.2g}", f"{row['logit_std']:.3g}"
        verdict = "passes" if row["passed"] else "DIFFERS"
        table.add_row(row["prompt"], row["dtype"], error, allowed, std, f"{row['tokens']}/{row['of']}", verdict)
    with contextlib.suppress(BrokenPipeError):
        Console().print(table)
