"""Which of equally good NICs a GPU uses first, so that all GPUs load all NICs evenly."""

from collections import defaultdict

Tiers = list[list[str]]  # of one GPU: groups of equally good NICs, best first


def spread(tiers_of: list[Tiers]) -> list[Tiers]:
    """Order each tier of each GPU.

    In turns, each GPU takes one more NIC of its tier. In each turn the largest number of GPUs on
    one NIC is as small as possible (by matching, not a heuristic), however tiers overlap. GPUs
    given in the same order get the same NICs in every process.

    Args:
        tiers_of: of every GPU of the machine, whether or not this process uses it.
    """
    result: list[Tiers] = [[] for _ in tiers_of]
    for level in range(max(map(len, tiers_of), default=0)):
        left = {gpu: list(t[level]) for gpu, t in enumerate(tiers_of) if level < len(t)}
        taken: defaultdict[str, int] = defaultdict(int)  # by how many GPUs, in all turns
        for gpu in left:
            result[gpu].append([])
        while left := {gpu: nics for gpu, nics in left.items() if nics}:
            for gpu, nic in _one_each(left, taken).items():
                taken[nic] += 1
                result[gpu][level].append(nic)
                left[gpu].remove(nic)
    return result


def _one_each(options: dict[int, list[str]], taken: dict[str, int]) -> dict[int, str]:
    """Give every GPU one of its NICs, none used more often than necessary."""
    chosen: dict[int, str] = {}
    most = min(taken[nic] for nics in options.values() for nic in nics)
    while len(chosen) < len(options):
        most += 1
        for gpu in options:
            if gpu not in chosen:
                _assign(gpu, options, taken, most, chosen, set())
    return chosen


def _assign(
    gpu: int,
    options: dict[int, list[str]],
    taken: dict[str, int],
    most: int,
    chosen: dict[int, str],
    tried: set[str],
) -> bool:
    """Find a NIC used fewer than ``most`` times for a GPU, reassigning other GPUs if needed."""
    options_left = [nic for nic in options[gpu] if nic not in tried]
    holders = {nic: [o for o, held in chosen.items() if held == nic] for nic in options_left}
    for nic in options_left:
        if taken[nic] + len(holders[nic]) < most:
            chosen[gpu] = nic
            return True
    for nic in options_left:
        tried.add(nic)
        for other in holders[nic]:
            if _assign(other, options, taken, most, chosen, tried):
                chosen[gpu] = nic
                return True
    return False
