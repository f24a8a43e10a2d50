"""The conductor's decision about a request, as data."""

from dataclasses import dataclass

from .reasons import Reason, Why
from .request import Request


@dataclass(frozen=True, slots=True)
class Fetch:
    """KV that the prefill instance pulls from another first; the source keeps its copy.

    The blocks ``[first_block, first_block + num_blocks)`` of the request's keys.
    """

    source: int
    target: int
    first_block: int
    num_blocks: int
    num_tokens: int
    seconds: float  # predicted, with the source's congestion


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Where a request is prefilled, and the predicted times.

    ``ttft_s`` is from the decision to the first token; it is ``wait_s + prefill_s`` and the time of
    the fetch, if any (in sequence or overlapped: that depends on the policy). In a pipeline it is
    longer if earlier requests are still in later stages.
    """

    instance: int
    local_tokens: int  # reused from its own cache
    prefix_tokens: int  # reused in total: its own, then fetched ones
    fetch: Fetch | None
    wait_s: float
    prefill_s: float  # on an idle instance
    occupied_s: float  # the part of it until the next one can begin
    ttft_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Where a request is decoded, and the predicted time of a step of that batch.

    ``tbt_s`` counts the requests that it decodes now and this one; ``reserved_tbt_s`` also those
    that it will decode once they are prefilled.
    """

    instance: int
    batch_size: int  # with this request
    kv_tokens: int  # with this request
    tbt_s: float
    reserved_tbt_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a request is accepted, where it goes, and why.

    For a refused request, ``prefill`` and ``decode`` are what was considered, if that step was
    reached. Under :class:`~.admission.Baseline` ``decode`` is None until its prefill is over, if it
    is chosen only then.
    """

    request: Request
    at_s: float
    accepted: bool
    prefill: PrefillChoice | None
    decode: DecodeChoice | None
    reason: Reason

    @classmethod
    def accept(
        cls, request: Request, at_s: float, prefill: PrefillChoice, decode: DecodeChoice | None
    ) -> "Decision":
        """Accept a request; without ``decode`` that is chosen when its prefill is over."""
        values = {"ttft_s": request.waited_s + prefill.ttft_s}
        if decode is None:
            reason = Reason(Why.ACCEPTED_PREFILL, values)
        else:
            reason = Reason(Why.ACCEPTED, values | {"tbt_s": decode.tbt_s})
        return cls(request, at_s, True, prefill, decode, reason)

    @classmethod
    def refuse(
        cls,
        request: Request,
        at_s: float,
        reason: Reason,
        prefill: PrefillChoice | None = None,
        decode: DecodeChoice | None = None,
    ) -> "Decision":
        """Refuse a request, with what was considered."""
        return cls(request, at_s, False, prefill, decode, reason)

    def __str__(self) -> str:
        """Return one sentence for each part of the decision."""
        lines = [f"request {self.request.request_id} is {'taken' if self.accepted else 'refused'}"]
        lines[0] += f": {self.reason}"
        if self.prefill:
            lines.append(f"prefill on {self.prefill.instance}: {self.prefill.reason}")
        if self.decode:
            lines.append(f"decode on {self.decode.instance}: {self.decode.reason}")
        return "\n  ".join(lines)
