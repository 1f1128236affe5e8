"""What `benchmarks.quality` measures: sections of questions, each with its rows of policies and bytes."""

import dataclasses
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.quality_tables import BYTES, ON_BOTH, ON_ROWS, TUNED
from vlkv import policies
from vlkv.compression.slots import slots_of
from vlkv.mini import pages
from vlkv.policies import KIVI, AdaKV, AirCache, Policy, Smooth, SnapKV, TurboQuant, compose
from vlkv.tools.evaluation.keeps import at_bytes, relative_size


class Cell(NamedTuple):
    """One row of the results."""

    name: str
    policy: Policy | str  # or "Oracle"
    bytes: float  # share of the bytes
    bits: int = 16

    @property
    def text(self) -> str:
        """The policy as Python code."""
        return self.policy if isinstance(self.policy, str) else policies.text_of(self.policy)

    @property
    def chosen(self) -> Policy:
        """The policy; for the oracle the one that determines how many tokens it keeps."""
        return policies.ImgRandom(keep=self.bytes) if isinstance(self.policy, str) else self.policy


@dataclasses.dataclass(frozen=True)
class Section:
    """Questions of one kind, and the rows to measure on them."""

    name: str
    kind: str  # of pages.KINDS, or "several"
    plan: tuple[Cell, ...]
    query_agnostic: bool = False  # compress before the question is known
    share: float = 1.0  # of the questions
    new_tokens: int = 8
    perplexity: bool = True  # needs a program of its own for each row


def published(name: str, share: float, layers: int) -> Policy | None:
    """A method with default settings that keeps all text; None if it cannot reach this share."""
    options: dict[str, Any] = {}
    if getattr(policies.named(name), "own_keep", False):  # it stores every entry, or always reduces alike
        return None
    if name == "avl":
        options = {"core": 0.75 * share}  # the paper's ratio
    elif name in ("lightkv", "tome", "pitome", "tofu"):
        stages = max(3, math.ceil(math.log2(1 / share)))  # each stage merges half at most
        if stages >= layers:
            return None
        if stages > 3:
            options = {"layers": tuple(range(layers - stages, layers))}
            if name == "lightkv":
                options["windows"] = (4, 2, *[1] * (stages - 2))
    return policies.make(name, keep=share, scope="vision", **options)


def compositions() -> dict[str, Policy]:
    """Scores with several kinds of smoothing; `keep` is set later."""
    text = AirCache(keep=0.1, window="text")
    snap, wide = (SnapKV(keep=0.1, window=8, kernel=kernel, scope="vision") for kernel in (1, 7))
    smoothed = {f"AirCache text, {name}": compose(text, smooth=smooth) for name, smooth in SMOOTHED.items()}
    before = {f"SnapKV window 8, {name}": compose(snap, smooth=SMOOTHED[name]) for name in ("8 before", "8 x 8 before")}
    return {"AirCache text": text, "SnapKV window 8, kernel 7": wide, **smoothed, **before}


# No smoothing, a tuned SnapKV, and the best two with the seed TUNED.
CHOSEN = ("AirCache text", "SnapKV window 8, kernel 7", ON_ROWS, ON_BOTH)


SMOOTHED = {
    "9 tokens": Smooth(9),
    "8 before": Smooth(8, one_sided=True),
    "8 before, max": Smooth(8, one_sided=True, pooling="max"),
    "7 x 7": Smooth((7, 7)),
    "8 x 8 before": Smooth((8, 8), one_sided=True),
    "8 x 8 before, max": Smooth((8, 8), one_sided=True, pooling="max"),
}


def sections(layers: int, head_dim: int, seed: int) -> list[Section]:
    """All sections, the most important first; with the seed TUNED they include all compositions."""
    full = Cell("Full", policies.Full(), 1.0)
    random = [Cell("ImgRandom", policies.ImgRandom(keep=b), b) for b in BYTES]
    oracle = [Cell("Oracle", "Oracle", b) for b in (0.1, 0.02)]
    stores = [store(bits=n) for store in (KIVI, TurboQuant) for n in (4, 2)]
    stored = [Cell(type(store).__name__, store, relative_size(store), store.bits) for store in stores]
    names = [name for name in policies.registry if name not in ("random", "imgrandom")]
    # The default settings of AdaKV smooth more than those of SnapKV, so its gain is not only that of budgets per head.
    smooth = partial(SnapKV, kernel=AdaKV.kernel, pooling=AdaKV.pooling, scope="vision")
    alike = [Cell("SnapKV smoothed as AdaKV", smooth(keep=b), b) for b in BYTES]

    def default(chosen: Iterable[str], shares: Iterable[float]) -> list[Cell]:
        pairs = ((share, published(name, share, layers)) for name in chosen for share in shares)
        exact = ((share, policy) for share, policy in pairs if policy is not None)
        return [Cell(type(p).__name__, at_bytes(p, share, head_dim=head_dim), share) for share, p in exact]

    def composed(chosen: Iterable[str], bits: Iterable[int], shares: Iterable[float]) -> list[Cell]:
        named = compositions()
        return [Cell(name, at_bytes(named[name], b, n), b, n) for name in chosen for n in bits for b in shares]

    everything = (full, *stored, Cell("Downsample", downsample(), 0.25), *default(policies.registry, BYTES))
    few = default(("snapkv", "aircache", "h2o", "prefixkv", "csp"), (0.2, 0.1, 0.05))
    few += composed(CHOSEN[:3], (4,), (0.1, 0.02))
    best = composed(compositions() if seed == TUNED else CHOSEN, (16, 4), (0.02, 0.01))
    return [
        Section("digits", "digits", (full,), new_tokens=40),
        Section("damage ledger", "ledger", everything, share=0.2),
        Section("damage digits", "digits", everything, share=0.1, new_tokens=40, perplexity=False),
        Section("damage unseen", "ledger", everything, query_agnostic=True, share=0.05),  # four questions for each page
        Section("baselines", "ledger", (full, *oracle, *random, Cell("Downsample", downsample(), 0.25))),
        Section("methods", "ledger", (full, *stored[:2], *default(filter(_evicts, names), BYTES), *alike)),
        Section("compositions right", "right", (full, *best)),
        Section("compositions", "ledger", (full, *best)),
        Section("shorter prompts", "ledger", (full, *default((n for n in names if not _evicts(n)), BYTES)), share=0.2),
        Section("query_agnostic", "ledger", (full, *few), query_agnostic=True, share=0.2),
        Section("several", "several", (full, *few), share=0.2),
    ]


def downsample() -> Policy:
    """Reduces an image of 24 x 24 tokens to 12 x 12."""
    return policies.Downsample(most=pages.GRID**2 // 4)


def _evicts(name: str) -> bool:
    policy = published(name, 0.2, layers=6)
    return policy is not None and slots_of(policy).reduce is None
