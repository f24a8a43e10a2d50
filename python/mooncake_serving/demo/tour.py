"""What the demo shows of a cluster that is up."""

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import mooncake_kernels as mk

from .alone import Alone
from .block_life import BlockWatch
from .client import Answer, Client, Refusal
from .notes import KITCHEN, LIGHTHOUSE, about
from .screen import Screen

NOTES = {"kitchen": KITCHEN, "lighthouse": LIGHTHOUSE}
MAX_TOKENS = 16
NUM_LESSONS, MAX_LESSONS, LESSON_S = 4, 20, 0.2
OBJECTIVES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # for any machine
NUM_AT_ONCE = (24, 48, 96)  # prompts of an overload: more only if none was refused
BLOCK_SHOWN = 4  # of a prompt: one that is all of the note
COLUMNS = ("CHAT", "TOKENS", "CACHED", "PREFILL", "DECODE", "FIRST TOKEN", "ANSWER")


def class_of(objective_s: float) -> str:
    """Return the name of the class of requests with an objective."""
    return f"within-{objective_s:g}s"


@dataclass(frozen=True)
class Running:
    """A cluster that is up.

    Attributes:
        url: of its router, which has a class of requests for each of ``OBJECTIVES_S``.
        model: that it serves.
        block_size: tokens of a block.
        events: of each engine, the endpoints of its KV events, and of those that were missed.
    """

    url: str
    model: str
    block_size: int
    events: Mapping[str, tuple[str, str]]


class Tour:
    """Shows a cluster, by chats with it.

    Args:
        running: the cluster.
        alone: the same model in a single process.
        screen: where it is shown.
    """

    def __init__(self, running: Running, alone: Alone, screen: Screen):
        self._running, self._alone, self._screen = running, alone, screen
        self._chats: list[tuple[str, Answer]] = []  # what was said, and what was answered

    def show(self) -> bool:
        """Show all; returns whether the tokens were those of a single process.

        Raises:
            httpx.HTTPError: a server of the cluster fails.
        """
        running = self._running
        with BlockWatch(running.events) as watch, Client(running.url, running.model) as client:
            self._warm_up(client)
            cold_s = self._show_cache(client)
            self._show_burst(client)
            self._show_block(watch)
            self._show_overload(client, cold_s)
        return self._compare()

    def _warm_up(self, client: Client) -> None:
        """Have the router measure prefills, so that nothing below is done for the first time."""
        for lesson in range(MAX_LESSONS):
            if lesson >= NUM_LESSONS:
                if client.knows_costs():
                    break
                time.sleep(LESSON_S)
            client.chats([_lesson(2 * lesson), _lesson(2 * lesson + 1)], 2)

    def _show_cache(self, client: Client) -> float:
        """Show the same notes when they are in no cache and when they are; returns a cold TTFT."""
        self._screen.head("Two chats at once, each about a note; then two more about these notes")
        rows = []
        for question, cache in enumerate(("cold", "warm")):
            answers = self._ask(client, [about(note, question) for note in NOTES.values()])
            rows += [(f"{name}, {cache}", one) for name, one in zip(NOTES, answers, strict=True)]
        self._table(rows)
        (_, cold), _, (_, warm), _ = rows
        self._screen.say(
            "Cold: nothing was in a cache but the system prompt, which all chats begin with. Warm: "
            f"an engine had the note, and the first token came after {warm.ttft_s:.2f} s instead "
            f"of {cold.ttft_s:.2f} s. Each answer says in a header why it was computed there:"
        )
        self._screen.say(f"x-mooncake-decision: {warm.header}", indent=4)
        self._screen.say("and the router's /decisions say it in words:")
        for step in ("prefill", "decode"):
            chosen = warm.decision[step]
            self._screen.say(f"{chosen['instance']}: {chosen['reason']}", indent=4)
        return cold.ttft_s

    def _show_burst(self, client: Client) -> None:
        """Show chats at once, whose notes are in caches."""
        said = [(name, about(note, q)) for q in range(2, 6) for name, note in NOTES.items()]
        self._screen.head(f"A burst: {len(said)} more chats about the same notes, at once")
        answers = self._ask(client, [content for _, content in said])
        self._table([(name, one) for (name, _), one in zip(said, answers, strict=True)])
        num_tokens = sum(one.decision["prompt_tokens"] for one in answers)
        num_cached = sum(one.num_cached_tokens for one in answers)
        self._screen.say(f"Of {num_tokens:,} prompt tokens, {num_cached:,} were in a cache.")

    def _show_block(self, watch: BlockWatch) -> None:
        """Show what has happened to a block of the first note."""
        tokens, size = self._alone.tokens(about(KITCHEN, 0)), self._running.block_size
        first = BLOCK_SHOWN * size
        name = int(mk.block_hashes(tokens, size)[BLOCK_SHOWN])
        self._screen.head("The life of a block")
        self._screen.say(
            f"A block is the keys and values of {size} tokens, such as "
            f"{self._alone.text(tokens[first : first + size])!r}. It is named by a hash of these "
            f"and of all tokens before them, {name:#x}. The engines' KV events and the router's "
            "decisions tell what became of it:"
        )
        decisions = [one.decision for said, one in self._chats if said.startswith(KITCHEN)]
        sources = {one["decode"]["instance"]: one["prefill"]["instance"] for one in decisions[::-1]}
        rows = [("0.00 s", "router", "the first question about the kitchen arrives")]
        life = watch.life_of(name, first, decisions)
        for (what, engine), group in groupby(life, lambda one: (one.what, one.engine)):
            moments = [*group]
            source = sources.get(engine, "")
            if what == "hit":
                chats = "later chat" if len(moments) == 1 else "later chats"
                told = f"hit: {len(moments)} {chats} began behind it"
            elif what == "removed":
                told = "removed: its memory was needed"
            else:
                told = f"stored: moved here from {source}" if source else "stored: computed here"
            rows.append((f"{moments[0].at_s - decisions[0]['at']:.2f} s", engine, told))
        self._screen.table(rows)

    def _show_overload(self, client: Client, cold_s: float) -> None:
        """Show that the router refuses what it could not serve in time."""
        objective_s = next((one for one in OBJECTIVES_S if one > 1.5 * cold_s), OBJECTIVES_S[-1])
        self._screen.head("An overload: more prompts at once than can be computed in time")
        for count in NUM_AT_ONCE:
            prompts = [self._alone.tokens(f"{count}/{i}. {KITCHEN}") for i in range(count)]
            ends = client.first_tokens(prompts, class_of(objective_s))
            refusals = [end for end in ends if isinstance(end, Refusal)]
            seconds = [end for end in ends if not isinstance(end, Refusal)]
            self._screen.say(
                f"{count} new prompts, each of which wants its first token within {objective_s:g} "
                f"s: {len(refusals)} were refused before anything was computed for them, "
                f"{len(seconds)} were accepted"
                + (f", the last of which had it after {max(seconds):.2f} s." if seconds else ".")
            )
            if refusals:
                break
        for refusal in refusals[:1]:
            self._screen.say(f"HTTP 429, Retry-After: {refusal.retry_after}", indent=4)
            self._screen.say(refusal.message, indent=4)

    def _compare(self) -> bool:
        """Show whether a single process gives the same tokens."""
        self._screen.head("The same chats in a single process, without any cache of prefixes")
        expected = self._alone.answers([said for said, _ in self._chats], MAX_TOKENS)
        pairs = zip(self._chats, expected, strict=True)
        num_same = sum(answer.parts == parts for (_, answer), parts in pairs)
        count = len(self._chats)
        if num_same == count:
            self._screen.say(f"All {count} answers have the same tokens.")
        else:
            self._screen.say(f"{count - num_same} of {count} answers have other tokens.")
        return num_same == count

    def _ask(self, client: Client, contents: list[str]) -> list[Answer]:
        answers = client.chats(contents, MAX_TOKENS)
        self._chats += zip(contents, answers, strict=True)
        return answers

    def _table(self, rows: Sequence[tuple[str, Answer]]) -> None:
        lines = [COLUMNS]
        for name, answer in rows:
            decision = answer.decision
            lines.append(
                (
                    name,
                    str(decision["prompt_tokens"]),
                    str(answer.num_cached_tokens),
                    decision["prefill"]["instance"],
                    decision["decode"]["instance"],
                    f"{answer.ttft_s:.2f} s",
                    textwrap.shorten(answer.text, 30, placeholder=" ..."),
                )
            )
        self._screen.table(lines)


def _lesson(number: int) -> str:
    """Return a text that begins as no other does, and is of another length than the next ones."""
    first = 100 * (number + 10)
    return f"Go on: {[*range(first, first + 5 + 3 * (number % 8))]}"
