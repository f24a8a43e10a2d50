"""The conductor: decides where a request is prefilled and decoded, and whether it is accepted.

Plain data in, a decision with its reason out. It needs only the standard library and numpy, so that
the same code runs in the simulator and can run in front of engines: docs/serving/conductor.md.
"""

from .admission import (
    AcceptAll,
    Admission,
    Baseline,
    EarlyRejection,
    Limits,
    PredictiveRejection,
)
from .cluster import Cluster, Role
from .conductor import Conductor
from .copies import (
    CachedBlock,
    Heat,
    ReplicaPolicy,
    Replicate,
    Swap,
    SwapAction,
    choose_swaps,
)
from .costs import (
    A800_X8,
    LLAMA2_70B,
    LLAMA3_70B,
    LLAMA_13B,
    Costs,
    DecodeCost,
    LinearDecode,
    MachineSpec,
    ModelSpec,
    NicTransfer,
    PipelinedPrefill,
    PolynomialPrefill,
    PrefillCost,
    Roofline,
    RooflineDecode,
    RooflinePrefill,
    TransferCost,
)
from .decision import Decision, DecodeChoice, Fetch, PrefillChoice
from .decoding import DecodeLoad, InFlight, choose_decode
from .errors import InvalidArgument
from .index import Index, KVEvent, PrefixIndex, ShardedIndex
from .policies import (
    KVCacheCentric,
    LoadBalance,
    LocalCacheAware,
    PrefillPolicy,
    PrefillView,
    Random,
    RoundRobin,
)
from .reasons import Reason, Why
from .request import Request, Slo
from .roles import RoleAdvice, RoleAdvisor
from .tiers import OneTier, Tiers

__all__ = [
    "A800_X8",
    "AcceptAll",
    "Admission",
    "Baseline",
    "CachedBlock",
    "Cluster",
    "Conductor",
    "Costs",
    "Decision",
    "DecodeChoice",
    "DecodeCost",
    "DecodeLoad",
    "EarlyRejection",
    "Fetch",
    "Heat",
    "InFlight",
    "Index",
    "InvalidArgument",
    "KVCacheCentric",
    "KVEvent",
    "LLAMA2_70B",
    "LLAMA3_70B",
    "LLAMA_13B",
    "Limits",
    "LinearDecode",
    "LoadBalance",
    "LocalCacheAware",
    "MachineSpec",
    "ModelSpec",
    "NicTransfer",
    "OneTier",
    "PipelinedPrefill",
    "PolynomialPrefill",
    "PredictiveRejection",
    "PrefillChoice",
    "PrefillCost",
    "PrefillPolicy",
    "PrefillView",
    "PrefixIndex",
    "Random",
    "Reason",
    "ReplicaPolicy",
    "Replicate",
    "Request",
    "Role",
    "RoleAdvice",
    "RoleAdvisor",
    "Roofline",
    "RooflineDecode",
    "RooflinePrefill",
    "RoundRobin",
    "ShardedIndex",
    "Slo",
    "Swap",
    "SwapAction",
    "Tiers",
    "TransferCost",
    "Why",
    "choose_decode",
    "choose_swaps",
]
