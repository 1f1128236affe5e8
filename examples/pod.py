"""Answer a batch on all devices of all hosts. Start the same script on every host of a TPU pod.

python examples/pod.py                                                     every device that is here
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/pod.py  four simulated CPU devices
"""

import os

import jax

import vlkv
from vlkv import mini, policies, sharding

if "TPU_WORKER_HOSTNAMES" in os.environ:  # several hosts: this must come before anything touches a device
    jax.distributed.initialize()
devices = jax.device_count()
model = 2 if devices % 2 == 0 else 1  # splits the weights: as small as they fit; must divide the heads
mesh = sharding.make_mesh(data=devices // model, model=model)  # `data` splits the rows of the batch
params, processor = vlkv.load("mini", mesh=mesh)  # every device reads its own shard
questions = ["what does row one say?", "what does row two say?"] * devices
inputs = sharding.place_inputs(processor([mini.PAGE] * len(questions), questions), mesh)
policy = policies.SnapKV(keep=0.5, scope="vision")
with jax.set_mesh(mesh):
    output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=16))
tokens = sharding.gather(output.tokens)  # on every host
if jax.process_index() == 0:
    print(*processor.decode(tokens)[:2], sep="\n")
