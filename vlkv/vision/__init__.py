"""Vision towers: pixels to features. They never import one another."""
