"""The compression methods, one per file, and a registry by name. `A as A` exports a name, for type checkers too."""

from __future__ import annotations

import tomllib
from typing import Any

from vlkv.compression.candidates import compress as compress
from vlkv.compression.candidates import select as select
from vlkv.compression.compose import compose as compose
from vlkv.compression.observe import LayerContext as LayerContext
from vlkv.compression.observe import Observation as Observation
from vlkv.compression.observe import column_sums as column_sums
from vlkv.compression.observe import each_row as each_row
from vlkv.compression.observe import group_mean as group_mean
from vlkv.compression.observe import rows_mass as rows_mass
from vlkv.compression.option_types import Scope as Scope
from vlkv.compression.policy import DecodingStages as DecodingStages
from vlkv.compression.policy import Facts as Facts
from vlkv.compression.policy import Policy as Policy
from vlkv.compression.policy import ReducingStages as ReducingStages
from vlkv.compression.reducing import ReducingPolicy as ReducingPolicy
from vlkv.compression.selection import Selection as Selection
from vlkv.compression.slots import Composed as Composed
from vlkv.compression.slots import Slots as Slots
from vlkv.compression.slots import slots_of as slots_of
from vlkv.compression.smooth import Smooth as Smooth
from vlkv.errors import InputError, suggestion
from vlkv.files import DATA
from vlkv.policies import own, syntax
from vlkv.policies.adakv import AdaKV as AdaKV
from vlkv.policies.aircache import AirCache as AirCache
from vlkv.policies.avl import AVL as AVL
from vlkv.policies.bacon import BACON as BACON
from vlkv.policies.cake import CAKE as CAKE
from vlkv.policies.cdpruner import CDPruner as CDPruner
from vlkv.policies.chunkkv import ChunkKV as ChunkKV
from vlkv.policies.criticalkv import CriticalKV as CriticalKV
from vlkv.policies.csp import CSP as CSP
from vlkv.policies.damage import Damage as Damage
from vlkv.policies.dart import DART as DART
from vlkv.policies.divprune import DivPrune as DivPrune
from vlkv.policies.downsample import Downsample as Downsample
from vlkv.policies.duoattention import DuoAttention as DuoAttention
from vlkv.policies.elastic import ElasticCache as ElasticCache
from vlkv.policies.evs import EVS as EVS
from vlkv.policies.expectedattention import ExpectedAttention as ExpectedAttention
from vlkv.policies.fastervlm import FasterVLM as FasterVLM
from vlkv.policies.fastv import FastV as FastV
from vlkv.policies.flashcache import FlashCache as FlashCache
from vlkv.policies.full import Full as Full
from vlkv.policies.h2o import H2O as H2O
from vlkv.policies.hired import HiRED as HiRED
from vlkv.policies.infinipotv import InfiniPotV as InfiniPotV
from vlkv.policies.ivtp import IVTP as IVTP
from vlkv.policies.keydiff import KeyDiff as KeyDiff
from vlkv.policies.kivi import KIVI as KIVI
from vlkv.policies.knorm import Knorm as Knorm
from vlkv.policies.kvzip import KVzip as KVzip
from vlkv.policies.lagkv import LagKV as LagKV
from vlkv.policies.lightkv import LightKV as LightKV
from vlkv.policies.lookm import LookM as LookM
from vlkv.policies.meda import MEDA as MEDA
from vlkv.policies.mixkv import MixKV as MixKV
from vlkv.policies.pitome import PiToMe as PiToMe
from vlkv.policies.prefixkv import PrefixKV as PrefixKV
from vlkv.policies.prumerge import PruMerge as PruMerge
from vlkv.policies.pyramiddrop import PyramidDrop as PyramidDrop
from vlkv.policies.pyramidkv import PyramidKV as PyramidKV
from vlkv.policies.qfilters import QFilters as QFilters
from vlkv.policies.random import ImgRandom as ImgRandom
from vlkv.policies.random import Random as Random
from vlkv.policies.randomattention import RandomAttention as RandomAttention
from vlkv.policies.rdkv import RDKV as RDKV
from vlkv.policies.rkv import RKV as RKV
from vlkv.policies.roco import RoCo as RoCo
from vlkv.policies.snapkv import SnapKV as SnapKV
from vlkv.policies.sparsevlm import SparseVLM as SparseVLM
from vlkv.policies.streaming import StreamingLLM as StreamingLLM
from vlkv.policies.tgvkv import TGVKV as TGVKV
from vlkv.policies.tofu import ToFu as ToFu
from vlkv.policies.tome import ToMe as ToMe
from vlkv.policies.tova import TOVA as TOVA
from vlkv.policies.triattention import TriAttention as TriAttention
from vlkv.policies.turboquant import TurboQuant as TurboQuant
from vlkv.policies.vidcom2 import VidCom2 as VidCom2
from vlkv.policies.visionzip import VisionZip as VisionZip
from vlkv.policies.vispruner import VisPruner as VisPruner
from vlkv.policies.vlcache import VLCache as VLCache

_papers = tomllib.loads((DATA / "papers.toml").read_text(encoding="utf-8"))  # in the order of tables and documents
_classes: dict[str, type[Policy]] = {
    name.lower(): cls for name, cls in globals().items() if isinstance(cls, type) and name.lower() in _papers
}
for _name, _cls in _classes.items():
    _cls.facts = _cls.facts._replace(**_papers[_name])
# These have names too, but not in the registry, whose methods can be compared at any `keep`.
without_keep: dict[str, type[Policy]] = {"downsample": Downsample}
registry: dict[str, type[Policy]] = {name: _classes[name] for name in _papers if name not in without_keep}


_TRAINED = "kvzap", "fastkvzip"  # methods that are not here, because people ask for them


def named(name: str) -> type[Policy]:
    """The policy class called `name`.

    Args:
        name: a name of the registry or of `without_keep`, in upper or lower case; or your own class as `FILE.py:CLASS`
            or `MODULE:CLASS`, whose code is executed; `NAME=FILE.py:CLASS` gives it another name in tables.

    Raises:
        InputError: there is no such policy; the message names a similar one.
    """
    if ":" in name:
        return own.load(name)
    known = registry | without_keep
    cls = known.get(name.lower())
    if cls is None:
        if name.lower() in _TRAINED:
            raise InputError(f"{name} needs a network that is trained for one model: use kvzip or expectedattention")
        hint = suggestion(name.lower(), known, "choose for example full, snapkv, h2o or aircache")
        raise InputError(f"no policy {name!r}: {hint} (`vlkv policies` lists all {len(known)})")
    return cls


def make(policy: str | type[Policy], /, **options: Any) -> Policy:
    """A policy from its text or class.

        make("snapkv", keep=0.1)
        make("compose(aircache(window='text'), store=kivi(bits=4))", keep=0.1)

    Args:
        policy: a text as described in `vlkv.policies.syntax`, or a class.
        options: further options of the policy, or of the policy that scores in a composition.

    Raises:
        InputError: the text cannot be read, a name or an option is unknown, or a value is wrong.
    """
    if not isinstance(policy, str):
        return syntax.construct(policy, options)
    parsed = syntax.parse(policy, named, options)
    for name in ("keep", "budget", "scope"):
        if options.get(name) is not None and getattr(parsed, name) != options[name]:
            raise InputError(f"{name}={options[name]!r} does not apply: {policy} has its own {name}")
    return parsed


def text_of(policy: Policy, *, scope: bool = False) -> str:
    """The text from which `make` constructs this policy, with the options that differ from their defaults.

    Args:
        policy: the policy.
        scope: for tables: whether the text has the scope of a `keep` or `budget` even if it is the method's default,
            and your own class without its file.
    """
    text = syntax.text_of(policy, named, scope=scope)
    return syntax.short(text) if scope else text
