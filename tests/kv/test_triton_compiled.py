"""The Triton kernel compiled for GPUs that this machine lacks: Triton's compiler, then ptxas.

Runs in a separate process, because functions decorated by the interpreter cannot be compiled.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from ..conftest import skip

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mooncake_kernels.triton import kv

def build(arch, word_bytes, ids, has, aligned):
    kernel, names = kv.copy_blocks_kernel, kv.copy_blocks_kernel.arg_names
    constants = {"HAS_SRC": has[0], "HAS_DST": has[1], "WORD": kv.WORD_TYPES[word_bytes],
                 "NUM_WORDS": kv.WORDS_PER_PROGRAM}
    # Numbers that int32 holds come as such, larger strides as int64; ones are constants.
    types = {"src_planes": "*i64", "dst_planes": "*i64", "src_ids": ids, "dst_ids": ids,
             "bad": "*i64", "src_base": "i64", "src_block_stride": "i64"}
    constants |= dict.fromkeys(("src_pieces_per_id", "dst_slots_per_block", "extent1"), 1)
    signature = {name: types.get(name, "i32") for name in names}
    signature |= {name: "constexpr" for name in constants}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in names
             if aligned and name not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"], "no machine code"
    # What the host looks at is stored last, behind what it says, for the whole system to see.
    assert "atom.global.sys.release.exch" in compiled.asm["ptx"], compiled.asm["ptx"]

arch = int(sys.argv[1])
for case in [(8, "*i64", (True, True), True), (4, "*i32", (True, False), False),
             (2, "*i32", (False, True), True), (1, "*i64", (True, True), False)]:
    build(arch, *case)
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernel_compiles_for_each_architecture(arch, tmp_path):
    if importlib.util.find_spec("triton") is None:
        skip("triton", "triton is not installed")
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(arch)]
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert result.returncode == 0, result.stderr[-4000:]
