"""Vision towers that families share: pixels to features."""
