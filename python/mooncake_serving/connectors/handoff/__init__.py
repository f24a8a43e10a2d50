"""Hand-off of requests from an engine that prefills to one that decodes. Knows no engine.

The receiver drives it. Its rank has allocated blocks for a prompt, and asks (``Ask``) those ranks
of the sending engine that hold its heads. For each chunk of blocks that is computed, a sender wants
(``Want``) a landing slot, is granted (``Grant``) one of the receiver's staging memory, packs the
blocks with checksums, and writes them in one piece, with a notification (``Chunk``) behind the
data. The first layers of a chunk may leave while its last ones are being computed (``strips``). The
receiver unpacks them into its cache, whatever its layout, block size or number of ranks, and the
slot is free again. So:

* It does not matter who comes first. A receiver that comes before the prefill gets chunks while
  the prompt is computed; one that comes after it gets all of them at once. Blocks that no one asks
  for within ``lease_s`` are released, and a receiver that comes later is told so. Once a receiver
  has all of them, or cancels, they are released when no other one asks for them; one that was
  refused, or has died, leaves them to the lease.
* Slots bound the memory on both sides. They are granted only for chunks that are ready, and given
  back (``Spare``) if a request loses its blocks meanwhile, so that none keeps others waiting.
* **No page is reused while it is read or written.** Peers write to staging memory only. A sender's
  pages are read by its own threads, and ``pause`` and ``drop`` return when that is over; a
  receiver's pages are written by its own thread, and likewise ``cancel``.
* **No slot is reused while it is written.** If a request ends early, slots that its sender may
  still write to stay aside until that says that it does not (``Ended``), or its process is gone. If
  it does neither for some seconds, its slots get other memory, and writes to the old are refused.
  Memory that is set aside so is at most that of all slots.
* **A failure is one request's.** Its reason comes with ``Result``: the sender has dropped it, is
  gone, silent or makes no progress, a message about it could not be sent, a chunk does not match
  its checksum, the prompt or the model is another one. A request is complete only if each of its
  blocks has come with all layers and heads of this rank, as the chunks' own headers say.

Both sides say every second what they still wait for (``Asking``, ``Serving``), so that either finds
out in bounded time that the other is stopped, restarted or cut off.
"""

from .endpoint import Endpoint
from .incoming import Result
from .params import COMPUTED_THERE, answer_params, digest_of_tokens, source_of, transfer_id_of
from .receiver import Receiver
from .sender import Sender
from .settings import HandoffSettings, Source
from .shards import INDIVISIBLE, REPLICATED, first_head, sources
from .strips import strips_of

__all__ = [
    "COMPUTED_THERE",
    "INDIVISIBLE",
    "REPLICATED",
    "Endpoint",
    "HandoffSettings",
    "Receiver",
    "Result",
    "Sender",
    "Source",
    "answer_params",
    "digest_of_tokens",
    "first_head",
    "source_of",
    "sources",
    "strips_of",
    "transfer_id_of",
]
