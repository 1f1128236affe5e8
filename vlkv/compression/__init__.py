"""What all methods share: stages, observations, selection, sizes and merging."""
