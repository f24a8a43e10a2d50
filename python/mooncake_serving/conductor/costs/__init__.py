"""Costs of prefill, decode and transfers in seconds: fitted, or by a roofline."""

from .fitted import LinearDecode, PipelinedPrefill, PolynomialPrefill
from .interface import Costs, DecodeCost, PrefillCost, TransferCost
from .roofline import Roofline, RooflineDecode, RooflinePrefill
from .specs import A800_X8, LLAMA2_70B, LLAMA3_70B, LLAMA_13B, MachineSpec, ModelSpec
from .transfer import NicTransfer

__all__ = [
    "A800_X8",
    "Costs",
    "DecodeCost",
    "LLAMA2_70B",
    "LLAMA3_70B",
    "LLAMA_13B",
    "LinearDecode",
    "MachineSpec",
    "ModelSpec",
    "NicTransfer",
    "PipelinedPrefill",
    "PolynomialPrefill",
    "PrefillCost",
    "Roofline",
    "RooflineDecode",
    "RooflinePrefill",
    "TransferCost",
]
