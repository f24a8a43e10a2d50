"""The part of ``ClusterStore`` that has other nodes take objects."""

import time
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host
from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult

from ..directory import Member
from .membership import preference
from .node_client import Pulls
from .reads import ClusterReader

DIRECT_S = 0.1  # for which a claimant waits for a direct put that its claim ends
PAUSE_S = 0.001
BEING_WRITTEN = PutResult.BEING_WRITTEN


class ClusterGiver(ClusterReader):
    """Gives objects that are claimed to other nodes, the one with the emptiest pool first."""

    def _give(
        self,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        options: np.ndarray,
        granted: list[int],
        results: list[PutResult],
        published: np.ndarray,
    ) -> None:
        """Have others take objects, whichever can."""
        homes = self._homes()
        _, unanswered, reason = self._offer(
            homes, words, objects, options, granted, results, published
        )
        if unanswered:
            raise Unavailable(f"put: no node with a pool takes it: {reason}")

    def _offer(
        self,
        homes: Sequence[Member],
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        options: np.ndarray,
        granted: list[int],
        results: list[PutResult],
        published: np.ndarray,
    ) -> tuple[list[int], set[int], str]:
        """Have others take objects; if a node cannot, the next one is asked.

        Returns:
            Which objects none of them has taken; for which of these none has answered; and why.
        """
        buffers = {i: [_in_host(part) for part in objects[i]] for i in granted}
        left, unanswered, reason = list(granted), set(granted), "there is none"
        for member in homes:
            if not left:
                break
            try:
                sent = [buffers[i] for i in left]
                answers = self._give_to(member, words[left], sent, options[left])
            except TransferError as error:
                self.node.backoff.failed(member, error)
                reason = str(error)
                continue
            for i, answer in zip(list(left), answers, strict=True):
                if isinstance(answer, str):
                    reason = answer
                    continue
                results[i] = answer
                unanswered.discard(i)
                published[i] = answer is PutResult.STORED
                if answer not in (PutResult.FULL, PutResult.OVER_QUOTA):
                    left.remove(i)
        return left, unanswered, reason

    def _give_to(
        self,
        member: Member,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        options: np.ndarray,
    ) -> Pulls:
        """Have one node take objects, and ensure that they are published: those that its engine has
        stored. What exists there and is not listed may be about to be removed: its node says, and
        lists it.
        """
        verify = self._verify > 0
        asking = self.node.client
        answers: list[PutResult | str | None] = list(
            asking.put(member.name, words, objects, options, verify=verify)
        )
        until = time.monotonic() + DIRECT_S
        while again := [i for i, answer in enumerate(answers) if answer is BEING_WRITTEN]:
            if time.monotonic() > until:
                break
            time.sleep(PAUSE_S)
            sent = [objects[i] for i in again]
            results = asking.put(member.name, words[again], sent, options[again], verify=verify)
            for i, result in zip(again, results, strict=True):
                answers[i] = result
        stored = [i for i, answer in enumerate(answers) if answer is PutResult.STORED]
        if not self.node.entries.publish_for(member.pool, words[stored]):
            for i in stored:
                answers[i] = f"{member.pool} has left"
        if left := [i for i, answer in enumerate(answers) if answer in (None, PutResult.EXISTS)]:
            taken = asking.give(
                member.name,
                words[left],
                [objects[i] for i in left],
                options[left],
                self.node.name,
                verify=verify,
            )
            for i, answer in zip(left, taken, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _homes(self) -> list[Member]:
        """Members whose pools take objects, without this node's: those that were silent lately
        last, and of the others the emptiest pool first.
        """
        homes = self.node.homes() or self.node.homes(anew=True)
        return sorted(homes, key=lambda member: member in self.node.backoff)

    def _preferred_homes(self, preferred: Sequence[str]) -> list[Member]:
        """Members whose pools are asked before the usual place takes an object: those that are
        preferred, and more than this node, the best first. Not those that were silent lately.
        """
        if not preferred:
            return []
        bound = len(preferred)
        if self._store is not None and not self.node.is_draining:
            for member in self.node.members():
                if member.pool == self.node.pool_name:
                    bound = min(bound, preference(member, preferred))
        ranks = [(preference(member, preferred), member) for member in self.node.homes()]
        wanted = [
            (rank, member)
            for rank, member in ranks
            if rank < bound and member not in self.node.backoff
        ]
        return [member for _, member in sorted(wanted, key=lambda one: one[0])]


def _in_host(buffer: Buffer) -> Buffer:
    """Memory that can be sent: a copy of what is on a GPU."""
    return buffer if buffer.is_host else as_buffer(copy_to_host([buffer]))
