"""Names of classes of transformers that stand in the files of a checkpoint."""

# Video processors that are named like the image processor of their model: a folder that names only the latter means both.
VIDEO_LIKE_IMAGE = frozenset(
    f"{name}VideoProcessor" for name in ("Qwen2VL", "Glm4v", "Glm46V", "SmolVLM", "LlavaOnevision")
)
