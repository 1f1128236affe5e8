"""Placement of weights, inputs and caches on a mesh of devices, and attention ops on it."""

from vlkv.sharding.placement import gather, make_mesh, path_name, place, place_cache, place_inputs, spec, where

__all__ = ["gather", "make_mesh", "path_name", "place", "place_cache", "place_inputs", "spec", "where"]
