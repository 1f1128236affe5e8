# The public names of vlkv. `__init__.py` reads this file.
from . import analysis as analysis
from . import cache as cache
from . import policies as policies
from . import processing as processing
from . import profiles as profiles
from . import sampling as sampling
from . import sharding as sharding
from .buckets import Buckets as Buckets
from .cache import PackedCache as PackedCache
from .errors import InputError as InputError
from .extend import extend as extend
from .families import init as init
from .families import presets as presets
from .generate import Output as Output
from .generate import decode as decode
from .generate import decode_step as decode_step
from .generate import forward as forward
from .generate import generate as generate
from .generate import log_probabilities as log_probabilities
from .generate import score as score
from .generate import stream as stream
from .inputs import Inputs as Inputs
from .loading import load as load
from .loading import load_params as load_params
from .loading import load_processor as load_processor
from .prefill import fill_cache as fill_cache
from .prefill import prefill as prefill
from .reading import Prompt as Prompt
from .reading import read_prompt as read_prompt
from .sampling import Greedy as Greedy
from .sampling import Sample as Sample
from .saving import load_cache as load_cache
from .saving import save_cache as save_cache

__version__: str
