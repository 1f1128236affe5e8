"""Fields of configs and image processors, changed one by one, beside transformers. Run from a checkout, with torch.

    python -m benchmarks.fuzz --out FILE [--families llava glm4v] [--sample 40]

For each family there is one tiny checkpoint. Every field of transformers' classes, and every older name of a field, is
null, absent, changed and at its bounds. A case is `equal` if the logits (or pixels) are; `refused` if vlkv raises
InputError; `unusable` if transformers fails itself; otherwise it differs, and `ACCEPTED` must have a reason.
"""
