"""The conductor of a simulated cluster, with the costs of its prefills and steps, run alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mooncake_serving.conductor import (
    AcceptAll,
    Admission,
    Cluster,
    Conductor,
    Costs,
    KVCacheCentric,
    NicTransfer,
    PipelinedPrefill,
    PolynomialPrefill,
    PrefillPolicy,
    PrefixIndex,
    Request,
    Role,
    Slo,
    TransferCost,
)

from .machines import Machine, Model
from .options import DisaggregatedOptions
from .prefill import PrefillInstance
from .step_cost import StepCost

NO_LIMIT = Slo(ttft_s=1e9, tbt_s=1e9)
LENGTHS = (64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)


class NoNetwork:
    """The transfers of machines without NICs: KV never arrives."""

    def seconds(
        self, num_tokens: ArrayLike, backlog_s: ArrayLike, num_sending: ArrayLike
    ) -> np.ndarray:
        """Predict a transfer; see :class:`~..conductor.TransferCost`. Zero tokens take no time."""
        return np.where(np.asarray(num_tokens) > 0, np.inf, 0.0)


def fit_costs(model: Model, machine: Machine, chunk_tokens: int, group_size: int = 1) -> Costs:
    """Fit the conductor's cost models to a grid of isolated prefills; decoding steps are exact.

    The paper does so offline, by regression (FAST'25, section 5). For prefills, a stage's share on
    each of ``group_size`` nodes is fitted; the time of the pipeline follows from it. A fit of steps
    that is linear in the batch would be 30 % too low just above one tile, where they get longer at
    once. Coupled instances move no KV, so their machine may have no NIC.
    """
    cost = StepCost(model, machine)
    prompts = [(n, n * part // 4) for n in LENGTHS for part in range(4)]
    stage_s = [cost.prefill_s(n, prefix, chunk_tokens) / group_size for n, prefix in prompts]
    lengths, prefixes = np.array(prompts).T
    stage = PolynomialPrefill.fit(lengths, prefixes, stage_s)
    transfer: TransferCost = NoNetwork()
    if machine.nic_bytes_per_s:
        transfer = NicTransfer(model.kv_bytes_per_token, group_size * machine.nic_bytes_per_s)
    return Costs(
        PipelinedPrefill(stage, group_size, chunk_tokens),
        cost,
        transfer,
        occupancy=stage,
    )


class StoreTiers:
    """Tells the conductor which part of each instance's store is on its SSD, without delay.

    Args:
        instances: the first ones of the conductor's; the others have no store.
    """

    def __init__(self, instances: Sequence[PrefillInstance]):
        self._instances = instances

    def lookup(self, request: Request, matched_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Get the plan of each instance; see :class:`~..conductor.Tiers`."""
        blocks, load_s = matched_blocks.copy(), np.zeros(len(matched_blocks))
        for i in np.flatnonzero(matched_blocks[: len(self._instances)]):
            instance = self._instances[int(i)]
            held, on_ssd = instance.store.match(request.keys)
            if on_ssd:
                plan = instance.plan(request.num_tokens, request.keys)
                load_s[i] = plan.load_s
                if plan.blocks < held:
                    blocks[i] = min(blocks[i], plan.blocks)
        return blocks, load_s


def make_conductor(
    roles: Sequence[Role],
    costs: Costs,
    *,
    capacity_tokens: int,
    max_batch_size: int,
    policy: PrefillPolicy | None = None,
    admission: Admission | None = None,
    slo: Slo = NO_LIMIT,
    seed: int = 0,
) -> Conductor:
    """Make a conductor over instances of these roles; by default Algorithm 1, accepting all."""
    return Conductor(
        Cluster(roles, capacity_tokens=capacity_tokens, max_batch_size=max_batch_size),
        PrefixIndex(len(roles)),
        costs,
        slo,
        policy=policy or KVCacheCentric(),
        admission=admission or AcceptAll(),
        seed=seed,
    )


def conductor_of(
    options: DisaggregatedOptions,
    *,
    policy: PrefillPolicy | None = None,
    admission: Admission | None = None,
    slo: Slo = NO_LIMIT,
    seed: int = 0,
) -> Conductor:
    """Make the conductor of a disaggregated cluster."""
    chunk_tokens, group_size = options.prefill.chunk_tokens, options.prefill.group_size
    return make_conductor(
        [Role.PREFILL] * options.num_prefill + [Role.DECODE] * options.num_decode,
        fit_costs(options.model, options.machine, chunk_tokens, group_size),
        capacity_tokens=options.machine.kv_capacity_tokens(options.model),
        max_batch_size=options.max_batch_size,
        policy=policy,
        admission=admission,
        slo=slo,
        seed=seed,
    )
