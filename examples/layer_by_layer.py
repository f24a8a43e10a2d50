"""Load and save KV layer by layer while the forward pass runs."""

from concurrent.futures import ThreadPoolExecutor

import torch

import mooncake_kernels as mk

NUM_LAYERS = 4


def cache() -> mk.KVView:
    return mk.KVView([torch.zeros(8, 16, 64) for _ in range(NUM_LAYERS)], axes="block token dim")


host, pool, saved = cache(), cache(), cache()
for layer in host.tensors:
    layer.normal_()

# On a GPU, signals and waits are queued on the stream, and a captured graph may contain them.
loads, saves = (mk.LayerStream(NUM_LAYERS, timeout_s=20) for _ in range(2))


def load(step: int) -> None:
    plan = mk.CopyPlan(host, pool)
    for layer in range(NUM_LAYERS):
        plan.run([2, 5], [0, 3], layers=[layer])
        loads.signal_from_host(layer, step)


def save(step: int) -> None:
    plan = mk.CopyPlan(pool, saved)
    for layer in range(NUM_LAYERS):
        saves.wait_on_host(layer, step)
        plan.run([0, 3], [2, 5], layers=[layer])


loads.begin_waits()
saves.begin_signals()
with ThreadPoolExecutor(2) as threads:
    jobs = [threads.submit(load, 1), threads.submit(save, 1)]
    for layer in range(NUM_LAYERS):  # the forward pass
        loads.wait_layer(layer)
        pool.tensors[layer] += 1
        saves.signal_layer(layer)
    for job in jobs:
        job.result()
loads.check()
for before, after in zip(host.tensors, saved.tensors, strict=True):
    assert torch.equal(after[[2, 5]], before[[2, 5]] + 1)
print(f"{NUM_LAYERS} layers were loaded, computed and saved in turn")
