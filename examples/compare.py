"""Compare five methods at equal bytes: slots as allocated, and KL divergence to the full cache's next tokens."""

import jax

import vlkv
from vlkv import mini, policies

params, processor = vlkv.load("mini")
inputs = processor(mini.PAGE, mini.QUESTION)
sampling = vlkv.Greedy(max_new_tokens=16)
for name in ("SnapKV", "H2O", "AirCache", "PrefixKV", "ImgRandom"):
    policy = policies.make(name, keep=0.1, scope="vision")  # one scope for all: text stays, 10 % of the image is kept
    slots = vlkv.pool_slots(params, inputs, policy, new_tokens=16)
    kl = vlkv.kl_to_full(params, inputs, policy, sampling=sampling, key=jax.random.key(0))[0]
    print(f"{name:10} {slots} slots   KL to the full cache {kl:.3f} nats per token")
