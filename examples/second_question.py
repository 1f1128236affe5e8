"""Ask several questions about one image, which is read and compressed once; the cache grows with the conversation."""

import vlkv
from vlkv import mini, policies

params, processor = vlkv.load("mini")
chat = vlkv.Chat(
    params,
    processor,
    mini.PAGE,
    policy=policies.SnapKV(keep=0.5, scope="vision"),
    sampling=vlkv.Greedy(max_new_tokens=16),
    query_agnostic=True,  # compress before any question is known, so that what is kept serves all of them
)
for question in ("what does row one say?", "what does row two say?"):
    print(question, end=" ")
    chat.ask(question, on_text=lambda text: print(text, end="", flush=True))
    print()
