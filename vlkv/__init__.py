"""Large vision-language models in JAX with a compressed key-value cache.

`__init__.pyi` lists the public names, for type checkers too. Each is imported when it is first used, so that code that
needs none of them does not load jax.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
