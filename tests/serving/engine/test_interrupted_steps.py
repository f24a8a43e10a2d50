"""Ctrl-C at every line of a step: no token is lost or repeated, every request ends, no block leaks.

``sys.settrace`` raises KeyboardInterrupt at one line of the engine's own code; the test repeats for
each of these lines.
"""

import linecache
import sys
from pathlib import Path

import pytest
import torch

import mooncake_serving.engine
from mooncake_serving.engine import SamplingParams

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
FOLDER = Path(mooncake_serving.engine.__file__).parent
FILES = {str(FOLDER / name) for name in ("batching.py", "scheduler.py", "block_allocator.py")}
END = "return outputs"  # of ``_step``


class Interrupter:
    """Raise KeyboardInterrupt at the line of ``FILES`` that is the ``count``-th to run."""

    def __init__(self, count):
        self.left = count
        self.before = sys.gettrace()  # that of tests/coverage

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        # What a function that ends has to return is lost then, whatever it does.
        is_end = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == END
        if event == "line" and not is_end:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def outputs_of(engine, interrupted_step, count):
    """Step until nothing is left; tell whether Ctrl-C came."""
    outputs, came = [], False
    for step in range(1000):
        if not engine.has_work:
            return outputs, came
        if step != interrupted_step:
            outputs += engine.step()
            continue
        try:
            with Interrupter(count):
                outputs += engine.step()
        except KeyboardInterrupt:
            came = True
    raise AssertionError("the requests never end")


@pytest.fixture
def quick_model(tiny, monkeypatch):
    """Every request's next token is the one after its last: what is tested is not the model."""

    def forward(batch, cache, *, requests, hooks):
        ends = torch.tensor(batch.row_starts[1:])[requests] - 1
        return torch.nn.functional.one_hot(batch.token_ids[ends] + 1, 264).float()

    monkeypatch.setattr(tiny, "forward", forward)


@pytest.mark.parametrize("interrupted_step", [0, 1, 2])
def test_step_may_be_interrupted_at_every_line(make_engine, quick_model, interrupted_step):
    """The steps include admissions, a prompt in chunks, decodes and the ends of requests."""
    count, came = 0, True
    while came:
        count += 1
        engine = make_engine(num_blocks=5, max_batch_tokens=8, max_requests=2)
        ids = [engine.add_request([10], PARAMS), engine.add_request([20] * 10, PARAMS)]
        ids.append(engine.add_prefilled([30], 31, engine.reserve(1, PARAMS), PARAMS))
        outputs, came = outputs_of(engine, interrupted_step, count)
        got = {request_id: [] for request_id in ids}
        for output in outputs:
            got[output.request_id].append((output.token_id, output.token_index, output.finished))
        want = [[(n, 0, False), (n + 1, 1, True)] for n in (11, 21, 31)]
        assert list(got.values()) == want, count
        assert engine.allocator.num_free == engine.cache.num_blocks, count
        assert (engine.num_running, engine.num_waiting) == (0, 0), count
    assert count > 20


def test_interrupted_stream_leaves_nothing_behind(make_engine, quick_model, monkeypatch):
    engine = make_engine()
    stream = engine.stream([[10], [20], [30]], PARAMS)
    finish = engine.scheduler.finish
    calls = []

    def interrupted_once(request):
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        finish(request)

    monkeypatch.setattr(engine.scheduler, "finish", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not engine.has_work and engine.allocator.num_free == engine.cache.num_blocks
    assert [answer.token_ids for answer in engine.generate([[40]], PARAMS)] == [[41, 42]]


def test_a_running_request_without_pending_tokens_is_an_error(make_engine, prompts):
    """It would otherwise be passed over for ever."""
    engine = make_engine()
    engine.add_request(prompts[0], PARAMS)
    engine.step()
    engine.scheduler.running[0].num_computed += 1
    with pytest.raises(ValueError, match="requests must have pending tokens"):
        engine.step()
