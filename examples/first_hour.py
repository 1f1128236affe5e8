"""A first hour with a published text model; docs/first_hour.md explains each step.

A method of your own, which uses attention, is measured beside published ones; a picture shows what each keeps of a
text; and a compressed cache is saved, and used again by another process.

    python examples/first_hour.py --against
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import vlkv
from vlkv import policies
from vlkv.cli import main as vlkv_command
from vlkv.families import Model
from vlkv.processing import Processor
from vlkv.saving import read_note

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jon Kim Leo Mia Ned Ola Pam Quin Ron Sue Tim Uma Vic Wes Zoe"
OTHERS = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
    "The train leaves at noon.", "Nobody had seen the key.", "It rained until the evening.",
)  # fmt: skip


class LastRows(policies.Policy):
    """Keeps the tokens that the last eight tokens of the prompt attend to most."""

    def score(self, obs: policies.Observation) -> jax.Array:
        """The attention of these rows, mean over the query heads that share a key head: [K, T]."""
        from_last = jnp.cumsum(obs.valid[::-1])[::-1]  # 1 for the last token
        rows = obs.valid & (from_last <= 8)
        return policies.group_mean(policies.rows_mass(obs, rows, most=8), obs.k.shape[0])


def write_questions(file: Path, count: int) -> None:
    """Each question asks for one of six numbers, which lie between other sentences."""
    draw, names, rows = random.Random(0), NAMES.split(), []
    for number in range(count):
        numbers = {name: draw.randrange(100, 1000) for name in draw.sample(names, 6)}
        facts = [f"The special magic number for {name} is: {magic}." for name, magic in numbers.items()]
        text = " ".join(f"{fact} {' '.join(draw.choices(OTHERS, k=8))}" for fact in facts)
        asked = draw.choice(list(numbers))
        rows.append({
            "id": f"number-{number}",
            "context": f"Some special magic numbers are hidden within the following text. {text}",
            "question": f"What is the special magic number for {asked} mentioned in the text?",
            "answer_prefix": f" The special magic number for {asked} mentioned in the text is",
            "answer": str(numbers[asked]),
        })  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_day(params: Model, processor: Processor, question: str, file: Path) -> None:
    """Answers a question about a text, and saves the compressed cache of its prompt."""
    policy = policies.compose(policies.SnapKV(keep=0.5), smooth=policies.Smooth(9))
    sampling = vlkv.Greedy(max_new_tokens=16)
    cache, logits = vlkv.prefill(params, processor(None, question), policy, sampling=sampling)
    vlkv.save_cache(file, params, cache, policy=policy, note={"question": question})
    tokens, lengths = vlkv.decode(params, cache, logits, sampling=sampling)
    print("today:", processor.decode(tokens, lengths)[0])


def next_day(model: str, file: str) -> None:
    """Asks a second question. The cache has the text, so the model does not read it again."""
    params, processor = vlkv.load(model)
    first = read_note(file)[1]["question"]
    cache = vlkv.load_cache(file, params, new_tokens=100)
    before = processor.prompts.write(first, 0)
    after = processor.prompts.write(first, 0, then=[("I see.", "Which name comes first in the text?")])
    cache, logits = vlkv.extend(params, cache, processor.extension([before], [after]))
    tokens, lengths = vlkv.decode(params, cache, logits, sampling=vlkv.Greedy(max_new_tokens=16))
    print("the next day:", processor.decode(tokens, lengths)[0])


def main() -> None:
    """Runs all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--against", action="store_true", help="also kvpress (extra peers)")
    parser.add_argument("--out", type=Path, default=Path("first_hour"))
    parser.add_argument("--next-day", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.next_day:
        next_day(args.model, args.next_day)
        return
    args.out.mkdir(parents=True, exist_ok=True)

    file = args.out / "questions.jsonl"
    write_questions(file, args.questions)
    own = f"{Path(__file__).resolve()}:LastRows"
    plan = ["full", "snapkv", "tova(recent=1, evict=False)", "streamingllm", own, f"compose({own}, smooth=Smooth(9))"]
    options = ["--keep", "0.25", "--metric", "needle", "--max-new-tokens", "8", "--out", str(args.out / "results")]
    compared = ["--against", "kvpress"] if args.against else []
    if vlkv_command(["eval", str(file), "--model", args.model, "--policy", *plan, *options, *compared]):
        sys.exit(1)

    params, processor = vlkv.load(args.model)
    row = json.loads(file.read_text().splitlines()[-1])
    question = f"{row['context']} {row['question']}"
    smoothed = policies.compose(LastRows(keep=0.25), smooth=policies.Smooth(9))
    methods = {"SnapKV": policies.SnapKV(keep=0.25), "LastRows": LastRows(keep=0.25), "smoothed": smoothed}
    kept = vlkv.draw_text_survivors(params, processor(None, question), processor, methods)
    kept.save(args.out / "kept.png")
    kept.save(args.out / "kept.html")

    saved = args.out / "text.safetensors"
    first_day(params, processor, question, saved)
    subprocess.run([sys.executable, __file__, "--model", args.model, "--next-day", str(saved)], check=True)


if __name__ == "__main__":
    main()
