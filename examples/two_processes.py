"""Write scattered KV blocks into the memory of another process, and tell it that they are there."""

import multiprocessing

import torch

import mooncake_kernels as mk

NUM_BLOCKS, BLOCK_BYTES = 64, 16384
SECRET = "at least sixteen characters, the same in both"


def decode(pipe) -> None:
    """The target: offers its memory, and waits for the notification."""
    cache = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    with mk.TransferEngine(secret=SECRET) as engine:
        region = engine.register(cache, access="write")
        pipe.send((engine.name, mk.BlockPool([region.address], NUM_BLOCKS, BLOCK_BYTES)))
        while not (heard := engine.receive_notifications(timeout_s=1)):
            pass
        pipe.send((heard[0][1], cache[[7, 8, 9], 0].tolist()))
        pipe.recv()  # until the other side is done with it


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs,))
    process.start()
    name, peer_pool = pipe.recv()  # "host:port", and where their blocks are

    cache = torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)
    with mk.TransferEngine(secret=SECRET) as engine:
        region = engine.register(cache, access="read")
        pool = mk.BlockPool([region.address], NUM_BLOCKS, BLOCK_BYTES)
        peer = engine.open(name)
        ticket = engine.write_blocks(
            peer, pool.blocks([3, 1, 4]), peer_pool.blocks([7, 8, 9]), notify=b"request 1"
        )
        ticket.wait()  # or: await ticket
        assert pipe.recv() == (b"request 1", [3, 1, 4])
        print("went by", list(engine.stats()["paths"][name]))  # shm: on one machine
        pipe.send("done")
    process.join()


if __name__ == "__main__":
    main()
