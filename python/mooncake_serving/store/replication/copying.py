"""Copy objects to one node, or remove them from it: which node is asked, and which one next."""

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult

from ..cluster import Node
from ..cluster.copied import GONE, keep_copies
from ..cluster.destinations import PoolDestination
from ..cluster.directory_entries import in_parts
from ..cluster.retention import uniform_options
from ..directory import Member

HERE = (PutResult.STORED, PutResult.EXISTS)
NO_HOLDER = "no living pool has it"


def copy_to(
    node: Node,
    target: Member,
    keys: np.ndarray,
    pools: Sequence[Sequence[str]],
    members: Sequence[Member],
    options: np.ndarray | None = None,
) -> list[PutResult | str]:
    """Have a pool take n objects, each from the first holder that can provide it.

    Args:
        node: sends the requests; the pool may be its own.
        target: serves the pool; if it does not answer, others that serve the pool are asked.
        keys: ``[n, 2]``.
        pools: for each object, the names of the pools that have it.
        members: the live members.
        options: ``[n]`` of ``PUT_OPTIONS``: how the pool keeps them; None: as after any put.

    Returns:
        For each ``STORED`` or ``EXISTS``: the pool has it now; or why not.
    """
    options = uniform_options(len(keys)) if options is None else options
    if target.pool == node.pool_name:
        return _copy_here(node, keys, pools, options)
    takers = [target.name]
    takers += [m.name for m in members if m.pool == target.pool and m.name != target.name]
    sources = [_sources(names, members, target) for names in pools]
    results: list[PutResult | str] = [NO_HOLDER] * len(keys)
    pending = [i for i in range(len(keys)) if sources[i]]
    while pending and takers:
        source = sources[pending[0]][0]
        asked = [i for i in pending if source in sources[i]]
        try:
            answers = node.client.pull(takers[0], keys[asked], source, options=options[asked])
        except (TransferError, Unavailable) as error:  # no other source would help
            for i in pending:
                results[i] = str(error)
            del takers[0]
            continue
        for i, answer in zip(asked, answers, strict=True):
            results[i] = answer
            sources[i].remove(source)
        pending = [i for i in pending if isinstance(results[i], str) and sources[i]]
    return results


def drop_from(
    node: Node, pool: str, keys: np.ndarray, members: Iterable[Member], *, hide: bool = False
) -> str:
    """Have a node that serves a pool remove objects from it: "", or why none has.

    ``hide``: in the own pool, by ``Store.hide_keys``.
    """
    if pool == node.pool_name and node.store is not None:
        if hide:
            node.store.hide_keys(keys)
        for first, second in [] if hide else keys.tolist():
            node.store.remove_key((first, second))
        node.entries.withdraw(keys)
        return ""
    reason = f"nobody serves {pool}"
    for member in members:
        if member.pool == pool:
            try:
                node.client.drop(member.name, keys)
                return ""
            except (TransferError, Unavailable) as error:
                reason = str(error)
    return reason


@contextlib.contextmanager
def leaving(node: Node, pool: str, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Withdraw those of ``[n, 2]`` objects from a pool that others have, so that they may leave it.

    Yields:
        ``[n]`` bool, which are withdrawn; and ``[n]`` bool, all false, to be set for those that
        have left. What was withdrawn and has not left is published again.

    Raises:
        Unavailable: the directory does not answer.
    """
    has_left = np.zeros(len(keys), bool)
    if pool == node.pool_name:  # it checks by itself what it has in the end
        with node.entries.leaving(keys) as is_withdrawn:
            yield is_withdrawn, has_left
        return
    is_withdrawn = np.ones(len(keys), bool)  # as far as is known, if there is no answer
    try:
        is_withdrawn = node.entries.give_up(pool, keys)
        yield is_withdrawn, has_left
    finally:
        with contextlib.suppress(Unavailable):  # the pool's nodes tell it at their next look
            for part in in_parts(keys[is_withdrawn & ~has_left]):
                node.directory.publish(pool, part, is_copy=True)


def _sources(pools: Iterable[str], members: Iterable[Member], target: Member) -> list[str]:
    """Names of nodes that serve pools, those of the target's host first."""
    serving = [m for m in members if m.pool in pools and m.pool != target.pool]
    random.shuffle(serving)
    return [m.name for m in sorted(serving, key=lambda m: m.host != target.host)]


def _copy_here(
    node: Node, keys: np.ndarray, pools: Sequence[Sequence[str]], options: np.ndarray
) -> list[PutResult | str]:
    if node.store is None:
        return [f"{node.name} has no pool"] * len(keys)
    with node.admission.enter():
        if not node.admission.is_open:
            return ["it is draining"] * len(keys)
        destinations = [
            PoolDestination(node.store, tuple(key), node.entries.copies, row)
            for key, row in zip(keys.tolist(), options, strict=True)
        ]
        is_here = node.store.has_keys(keys)
        for i in np.flatnonzero(is_here).tolist():
            destinations[i].exists()
        missing = np.flatnonzero(~is_here).tolist()
        outcomes = node.read(
            keys[missing], [destinations[i] for i in missing], [pools[i] for i in missing]
        )
        results: list[PutResult | str] = [PutResult.EXISTS] * len(keys)
        for i, outcome in zip(missing, outcomes, strict=True):
            results[i] = destinations[i].result or outcome.name
        for i in keep_copies(node.store, node.entries, keys, destinations):
            results[i] = GONE
    return results
