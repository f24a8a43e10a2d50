"""Records what vLLM publishes of its cache, for tests/serving/router/test_recorded_events.py.

    python -m tests.serving.in_vllm.record_events "$MK_TEST_VLLM" FILE

An engine with few blocks serves prompts of which many begin alike, twice, with its cache emptied
before each time. A line of the file is a message: its number, and its payload in base64.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path

import zmq

from tests.metadata.support import free_port
from tests.serving.in_vllm.support import BLOCK, Vllm, related_prompts

NUM_BLOCKS = 48
QUIET_MS = 1000


def main(python: str, file: str) -> None:
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    options = {"kv_events_config": events, "num_gpu_blocks_override": NUM_BLOCKS}
    options |= {"block_size": BLOCK, "max_num_seqs": 1}
    heard = zmq.Context.instance().socket(zmq.SUB)
    heard.subscribe(b"")
    heard.connect(f"tcp://127.0.0.1:{port}")
    lines = []
    with tempfile.TemporaryDirectory() as folder, Vllm(python, Path(folder)) as vllm:
        engine = vllm.engine(options=options).wait()
        for seed in (1, 2):
            engine.serve(related_prompts(20, seed), 3)
            while heard.poll(QUIET_MS):
                _, number, payload = heard.recv_multipart()
                lines.append([int.from_bytes(number, "big"), base64.b64encode(payload).decode()])
        engine.end()
    Path(file).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sys.stdout.write(f"{len(lines)} messages\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
