"""The model in a single process, with which the cluster must agree."""

from pathlib import Path

from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model


class Alone:
    """Answers chats by one engine, which keeps no prefixes and hands nothing over.

    Args:
        model: a path as ``load_model`` takes it; None: the default model.
        device: where it computes.
        block_size: tokens of a block of its cache.
    """

    def __init__(self, model: str | Path | None, device: str, block_size: int):
        self._model, self._tokenizer = load_model(model, device=device, batch_invariant=True)
        self._device, self._block_size = device, block_size

    def tokens(self, content: str) -> list[int]:
        """Return the prompt of a chat in which a user says something."""
        return self._tokenizer.encode_chat([{"role": "user", "content": content}])

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(tokens)

    def answers(self, contents: list[str], max_tokens: int) -> list[list[str]]:
        """Answer what several users say, by the likeliest tokens.

        Returns:
            The texts of each answer's tokens; of tokens that have some.
        """
        prompts = [self.tokens(content) for content in contents]
        num_blocks = sum(-(-(len(prompt) + max_tokens) // self._block_size) for prompt in prompts)
        cache = PagedKVCache(
            self._model.config,
            num_blocks,
            block_size=self._block_size,
            dtype=self._model.dtype,
            device=self._device,
        )
        engine = Engine(self._model, cache)
        streams = [self._tokenizer.stream() for _ in prompts]
        parts: list[list[str]] = [[] for _ in prompts]
        for index, output in engine.stream(prompts, SamplingParams(max_tokens=max_tokens)):
            stream, reason = streams[index], output.finish_reason
            text = "" if reason == "stop" else stream.push(output.token_id)
            text += "" if reason is None else stream.finish()
            parts[index] += [text] if text else []
        return parts
