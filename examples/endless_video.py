"""Watch a video without an end in a cache of constant size, and ask about it at any time.

python examples/endless_video.py Qwen/Qwen3-VL-2B-Instruct 3600

The video is made here: a square moves from left to right, and gets another colour after every minute.
"""

import sys
from collections.abc import Iterator

import numpy as np

import vlkv
from vlkv import policies

FPS, COLOURS = 2, ((200, 0, 0), (0, 140, 0), (0, 0, 220))


def frames(count: int) -> Iterator[np.ndarray]:
    """Pictures of 112 x 112 pixels."""
    for i in range(count):
        frame, left = np.full((112, 112, 3), 255, np.uint8), 4 * (i % 22)
        frame[44:68, left : left + 24] = COLOURS[i // (60 * FPS) % len(COLOURS)]
        yield frame


model, count = sys.argv[1], int(sys.argv[2])
params, processor = vlkv.load(model)
policy = policies.compose(policies.InfiniPotV(budget=2048), every=512)
sampling = vlkv.Greedy(max_new_tokens=24)
chat = vlkv.Chat(params, processor, policy=policy, sampling=sampling, keep_system=True)
for number, frame in enumerate(frames(count), 1):
    chat.watch(frame, fps=FPS)
    if number % (150 * FPS) == 0 or number == count:
        answer = chat.ask("Which colour does the square have now, and which did it have before?")
        print(f"{number / FPS:g} s of video, {chat.cache.bytes / 2**20:.1f} MiB: {answer}")
