"""Names of classes of transformers that stand in the files of a checkpoint."""

# Video processors that are named like their model's image processor: a folder that names only that one means both.
VIDEO_LIKE_IMAGE = frozenset(
    f"{name}VideoProcessor" for name in ("Qwen2VL", "Glm4v", "Glm46V", "SmolVLM", "LlavaOnevision")
)
