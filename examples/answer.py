"""Answer a question about an image from a compressed cache, and draw what was kept. Runs offline on the demo model."""

import vlkv
from vlkv import mini, policies

params, processor = vlkv.load("mini")  # or a checkpoint folder, or a hub id such as "llava-hf/llava-1.5-7b-hf"
inputs = processor(mini.PAGE, mini.QUESTION)  # or your image: a path, bytes, a PIL image or a numpy array
policy = policies.SnapKV(keep=0.2, scope="vision")
output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=16))
print(mini.QUESTION, processor.decode(output.tokens[0]))
print(f"cache: {output.cache_bytes / 1024:.0f} KiB, tail for 16 new tokens included")
vlkv.draw_survivors(params, inputs, mini.PAGE, [policies.Full(), policy]).save("kept.png")
