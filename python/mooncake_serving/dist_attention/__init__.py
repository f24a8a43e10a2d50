"""Instances that lend each other cache blocks: DistAttention (Infinite-LLM, arXiv:2401.02669).

An instance whose request does not fit keeps the keys and values of its first tokens in other
instances' caches. In every layer it sends them queries, and merges their partial attention with its
own: kilobytes of queries move, not the cache.

It needs the packages of the extra ``serving``.
"""

from mooncake_kernels.extras import needed_from

with needed_from("serving", __name__):
    from .borrower import Borrowed, Borrower
    from .dist_attention import DistAttention
    from .errors import LenderFailed
    from .geometry import Geometry
    from .ledger import Heartbeat, LoanLedger, Offer
    from .lender import Lender
    from .member import Manager, Member
    from .options import LoanOptions

__all__ = [
    "Borrowed",
    "Borrower",
    "LenderFailed",
    "LoanLedger",
    "DistAttention",
    "Geometry",
    "Heartbeat",
    "Lender",
    "Manager",
    "Member",
    "Offer",
    "LoanOptions",
]
