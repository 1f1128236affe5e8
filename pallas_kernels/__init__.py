"""Attention kernels for compressed caches. Each op has a specification (`reference.py`) and one file per backend.

This package imports jax only and does not depend on models or policies.
"""

from pallas_kernels.attention_mass import attention_mass, attention_mass_rows
from pallas_kernels.decode_attention import combine, core_attention, decode_attention
from pallas_kernels.digits import DigitPool, quantize_digits
from pallas_kernels.dispatch import Kernels
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.quantized import Quantized, QuantizedPool, dequantize, quantize, quantize_rotated
from pallas_kernels.slots import swap_slots, write_slots

__all__ = [
    "DigitPool",
    "Kernels",
    "Quantized",
    "QuantizedPool",
    "attention_mass",
    "attention_mass_rows",
    "combine",
    "core_attention",
    "decode_attention",
    "dequantize",
    "prefill_attention",
    "quantize",
    "quantize_digits",
    "quantize_rotated",
    "swap_slots",
    "write_slots",
]
