"""Backends of `write_slots` and `swap_slots`, which change slots of pools in place."""
