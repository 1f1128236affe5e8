"""Policies of each registered method with a mechanism: tests of the mechanism name no method, so methods can go."""

from vlkv import policies

# Methods whose budgets are bits, not entries; a few bits for every token take a quarter of the bytes.
IN_BITS = {
    name: policies.make(name, keep=0.1) for name, cls in policies.registry.items() if cls.facts.budgets == "bits"
}
# The beginnings of the texts of methods that compare the tokens of successive layers.
COMPARES_LAYERS = [f"{cls.__name__}(" for cls in policies.registry.values() if hasattr(cls, "across")]
