"""The scheduler's part of a hand-off between two engines of vLLM: ``HandoffScheduler``.

``kv_transfer_params`` of a request decide. For the engine that prefills: ``do_remote_decode``, and
``transfer_id`` if the proxy sends the request to both at once (otherwise the request's own id). It
answers with those for the other engine: ``do_remote_prefill``, ``transfer_id``, and where its ranks
are. A proxy written for NixlConnector passes these on; one that sends to both at once gives
``do_remote_prefill``, ``transfer_id``, ``remote_host`` and ``remote_port``.

What is handed over is the prompt without its last token, which the decode engine computes for the
next one. A state of a recurrent layer is of one number of tokens, and no other can be had from it:
where there are such layers, the engine that prefills leaves the last token away, too.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..handoff import COMPUTED_THERE, answer_params, source_of, transfer_id_of
from .handoff_step import HandoffStep, Offer, Progress, Receive, digest_of, is_of_tokens
from .steps import GroupForm

log = logging.getLogger("mooncake_serving.connectors.vllm")

MAX_BEGUN = 4096  # transfers that are remembered as received
COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass
class _Sending:
    transfer_id: str
    num_tokens: int
    num_computed: int = 0


class HandoffScheduler:
    """Decides what is handed over, and says so to the workers. Imports nothing of vLLM.

    Args:
        engine_id: of this engine.
        groups: that are handed over, by their places in vLLM's block tables.
        sends: whether requests may be prefilled here for other engines.
        receives: whether requests may be prefilled elsewhere for this one.
    """

    def __init__(
        self, engine_id: str, groups: Mapping[int, GroupForm], *, sends: bool, receives: bool
    ):
        self._engine_id, self._groups = engine_id, dict(groups)
        self._has_states = any(form.kind == "state" for form in groups.values())
        self._sends, self._receives = sends, receives
        # Not the engine's id, which users may give to several.
        self._receiver_id = secrets.token_hex(8)
        self._ranks: list[str] = []
        self._sending: dict[str, _Sending] = {}  # by request, until the workers are done with it
        self._receiving: set[str] = set()  # requests, until the workers have reported them
        self._begun: OrderedDict[str, None] = OrderedDict()  # transfers that were asked for
        self._step = HandoffStep()

    @property
    def has_waiting(self) -> bool:
        """Whether the workers have to be told something, even if no request is computed."""
        return self._step != HandoffStep()

    def set_ranks(self, ranks: Sequence[str]) -> None:
        """Set where the ranks of this engine are reached, in order."""
        self._ranks = list(ranks)
        self._step.ranks = list(ranks)

    def added(self, request: Any) -> None:
        """Let other engines ask for a request, before anything of it is computed.

        Its last token is taken from it if the model has recurrent layers.
        """
        params, request_id = request.kv_transfer_params or {}, request.request_id
        if not self._sends or not params.get("do_remote_decode") or request_id in self._sending:
            return
        named = {"transfer_id": params.get("transfer_id")}
        transfer_id = transfer_id_of(named, request_id)
        if transfer_id is None:
            log.warning("%s is not handed over: its transfer_id is no name", request_id)
        elif any(other.transfer_id == transfer_id for other in self._sending.values()):
            log.warning(
                "%s is not handed over: another request has its transfer_id %s",
                request_id,
                transfer_id,
            )
        elif reason := self._refusal(request):
            log.warning("%s is not handed over: %s", request_id, reason)
            self._step.drops.append((transfer_id, reason))
        else:
            num_tokens = len(request.prompt_token_ids) - 1
            if self._has_states:
                _leave_last_token_away(request)
            digest = digest_of(request, num_tokens)
            self._sending[request_id] = _Sending(transfer_id, num_tokens)
            self._step.offers.append(Offer(request_id, transfer_id, digest, num_tokens))

    def matched(self, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens after the computed ones another engine will send; 0: none.

        It has no effect, and may be called again.
        """
        params = request.kv_transfer_params or {}
        if not self._receives or not params.get("do_remote_prefill"):
            return 0
        transfer_id = transfer_id_of(params, request.request_id)
        if transfer_id in self._begun:
            return 0  # another sample of the same prompt has received it
        if not is_of_tokens(request) or transfer_id is None or source_of(params) is None:
            log.warning(
                "%s is computed here: its kv_transfer_params name no engine or transfer, or its "
                "prompt is not of tokens",
                request.request_id,
            )
            return 0
        return max(0, len(request.prompt_token_ids) - 1 - num_computed_tokens)

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Begin a hand-off: the request has blocks.

        Args:
            request: of vLLM.
            block_ids: its block table in each group.
            num_external_tokens: what ``matched`` has returned, or 0 if nothing is to come.
        """
        params, request_id = request.kv_transfer_params or {}, request.request_id
        if self._receives and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False  # once: if it is preempted, it is computed here
            source, transfer_id = source_of(params), transfer_id_of(params, request_id)
            if source is None or transfer_id is None or transfer_id in self._begun:
                return
            self._begin(transfer_id)
            if num_external_tokens == 0:  # the engine's own cache has all of it
                self._step.releases.append((source, transfer_id))
                return
            self._receiving.add(request_id)
            num_tokens = len(request.prompt_token_ids) - 1
            self._step.receives.append(
                Receive(
                    request_id,
                    self._receiver_id,
                    source,
                    transfer_id,
                    digest_of(request, num_tokens),
                    num_tokens - num_external_tokens,
                    num_tokens,
                    self._tables(block_ids),
                )
            )

    def step(self, scheduler_output: Any) -> HandoffStep:
        """Return what the workers do at this step, once.

        Args:
            scheduler_output: vLLM's.
        """
        for request_id in scheduler_output.preempted_req_ids or ():
            if sending := self._sending.get(request_id):
                sending.num_computed = 0
                self._step.pauses.append(sending.transfer_id)
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_computed in computed.items():
            sending = self._sending.get(request_id)
            if sending is None or sending.num_computed >= sending.num_tokens:
                continue
            num_computed += scheduler_output.num_scheduled_tokens[request_id]
            sending.num_computed = min(num_computed, sending.num_tokens)
            tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            self._step.progress.append(
                Progress(sending.transfer_id, sending.num_computed, self._tables(tables))
            )
        step, self._step = self._step, HandoffStep()
        return step

    def finished(
        self, request: Any, *, is_loading: bool = False
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Args:
            request: of vLLM.
            is_loading: whether vLLM waits for a load of it from a store.

        Returns:
            Whether its blocks must stay until the workers report it as sent; and the answer's
            ``kv_transfer_params``. Those for a prompt of which nothing is handed over, such as one
            of one token, have the other engine compute it.
        """
        params, request_id = request.kv_transfer_params or {}, request.request_id
        # vLLM itself keeps its blocks until it is received, and takes no other report of it.
        if request_id in self._receiving or is_loading:
            self._step.cancels.append(request_id)
            sending = self._sending.pop(request_id, None)
            if sending is not None and not self._take_back(sending):
                self._step.drops.append((sending.transfer_id, "the request was aborted"))
            return False, None
        sending, is_complete = self._sending.get(request_id), request.status.name in COMPLETE
        if self._receives and params.get("do_remote_prefill"):  # aborted before it had blocks
            params["do_remote_prefill"], is_complete = False, False
            source, transfer_id = source_of(params), transfer_id_of(params, request_id)
            if source and transfer_id and transfer_id not in self._begun:
                self._begin(transfer_id)
                self._step.releases.append((source, transfer_id))
        if sending is None:
            is_asked = self._sends and params.get("do_remote_decode") and is_complete
            if is_asked and self._why_nothing(request):
                return False, dict(COMPUTED_THERE)
            return False, None
        if not is_complete or sending.num_computed < sending.num_tokens:
            if self._take_back(sending):
                del self._sending[request_id]
                return False, None
            reason = f"the prefill engine has ended the request: {request.status.name}"
            if is_complete:  # its last token was on its way when it lost its blocks
                reason = "the prefill engine has preempted the request"
            self._step.drops.append((sending.transfer_id, reason))
            return True, None
        return True, self._answer(sending, request)

    def output(self, connector_output: Any) -> None:
        """Forget what the workers have reported as sent or received."""
        for request_id in connector_output.finished_sending or ():
            self._sending.pop(request_id, None)
        self._receiving.difference_update(connector_output.finished_recving or ())

    def _refusal(self, request: Any) -> str | None:
        """Return why a request cannot be handed over."""
        if reason := self._why_nothing(request):
            return reason
        if all(form.kind == "full" for form in self._groups.values()):
            return None
        if request.max_tokens != 1:  # its windows and states move on
            return (
                "max_tokens must be 1 in the prefill engine of a model with sliding windows or "
                f"recurrent layers, got {request.max_tokens}"
            )
        if self._has_states and request.kv_transfer_params.get("do_remote_prefill"):
            return "of a model with recurrent layers, what was received is not handed on"
        return None

    def _why_nothing(self, request: Any) -> str | None:
        """Return why nothing of a prompt can be handed over, however it is asked for."""
        if not is_of_tokens(request):
            return "its prompt is not of tokens"
        if len(request.prompt_token_ids) < 2:
            return "all but the last token of a prompt is handed over, and it has one"
        if not self._has_states:
            return None
        if request.skip_reading_prefix_cache:
            return "it asks for more than the prompt's states, as prompt_logprobs do"
        for feature in request.mm_features or ():
            place = feature.mm_position
            if place.offset + place.length >= len(request.prompt_token_ids):
                return "its prompt ends with an image, and the model has recurrent layers"
        return None

    def _take_back(self, sending: _Sending) -> bool:
        """Take back an offer that no worker knows of yet."""
        offers = self._step.offers
        self._step.offers = [one for one in offers if one.transfer_id != sending.transfer_id]
        return len(self._step.offers) < len(offers)

    def _begin(self, transfer_id: str) -> None:
        self._begun[transfer_id] = None
        while len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)

    def _answer(self, sending: _Sending, request: Any) -> dict[str, Any]:
        return answer_params(
            self._ranks,
            self._engine_id,
            sending.transfer_id,
            request.request_id,
            sending.num_tokens,
        )

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(block_ids[group]) for group in self._groups]


def _leave_last_token_away(request: Any) -> None:
    """Have vLLM compute all but the last token of a request that it has not scheduled yet."""
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # the list may be its sender's
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    if request.block_hashes:  # the last one may be of that token
        request.block_hashes.pop()
        request.update_block_hashes()
