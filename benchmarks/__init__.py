"""Measurements of quality, speed and memory; every result is a JSON file that describes the machine."""
