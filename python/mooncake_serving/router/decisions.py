"""The last decisions, for people: where each request went, why, and how it ended."""

import time
from collections import deque
from typing import Any

from mooncake_serving.conductor import Decision

from .call import Call
from .config import AdmissionConfig
from .instances import Instances

MAX_KEPT = 1000
MAX_MODEL = 80  # characters of a name, which any client may choose


class DecisionLog:
    """Keeps the last decisions as JSON objects.

    Args:
        instances: to name them.
        admission: with the objectives of requests, by their class.
    """

    def __init__(self, instances: Instances, admission: AdmissionConfig):
        self._instances, self._admission = instances, admission
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT)

    def add(self, call: Call, decision: Decision) -> dict[str, Any]:
        """Add a decision; how its request goes on is written into what this returns."""
        objectives = self._admission.classes.get(call.class_name, self._admission)
        entry: dict[str, Any] = {
            "at": time.time(),
            "request_id": call.request_id,
            "model": call.model[:MAX_MODEL],
            "class": call.class_name,
            "attempt": call.num_attempts,
            "waited_s": decision.request.waited_s,
            "prompt_tokens": decision.request.num_tokens,
            "objectives": {  # infinite: null, in JSON
                "ttft_s": objectives.ttft_s,
                "tbt_s": objectives.tbt_s,
            },
            "accepted": decision.accepted,
            "reason": str(decision.reason),
            "why": decision.reason.why.name,
        }
        if prefill := decision.prefill:
            entry["prefill"] = {
                "instance": self._instances[prefill.instance].name,
                "cached_tokens": prefill.prefix_tokens,
                "wait_s": prefill.wait_s,
                "prefill_s": prefill.prefill_s,
                "ttft_s": prefill.ttft_s,
                "reason": str(prefill.reason),
            }
        if decision.decode:
            entry["decode"] = self.decode_part(decision)
        self._kept.append(entry)
        return entry

    def decode_part(self, decision: Decision) -> dict[str, Any]:
        """Describe where a request is decoded."""
        decode = decision.decode
        assert decode is not None
        return {
            "instance": self._instances[decode.instance].name,
            "batch_size": decode.batch_size,
            "tbt_s": decode.tbt_s,
            "reason": str(decode.reason),
        }

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last ``count`` entries, the latest first."""
        return [*self._kept][: -count - 1 : -1]


def header_of(entry: dict[str, Any]) -> str:
    """Return a decision in one line, for the header ``x-mooncake-decision``."""
    parts = [f"attempt={entry['attempt']}", f"prompt_tokens={entry['prompt_tokens']}"]
    if entry["class"]:
        parts.append(f"class={entry['class']}")
    if prefill := entry.get("prefill"):
        parts.append(f"prefill={prefill['instance']}")
        parts.append(f"cached_tokens={prefill['cached_tokens']}")
        parts.append(f"ttft_s={prefill['ttft_s']:.4f}")
    if decode := entry.get("decode"):
        parts.append(f"decode={decode['instance']}")
        parts.append(f"tbt_s={decode['tbt_s']:.4f}")
    parts.append(f"why={entry['why']}")
    return "; ".join(parts)
