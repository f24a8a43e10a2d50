"""The Triton kernels compiled for GPUs that are not here: Triton's compiler, and ptxas with it.

One form of each kernel, and with --soak more. In a process of its own, for what the interpreter has
decorated cannot be compiled.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from ..conftest import skip

PROGRAM = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mooncake_kernels.triton import attention, attention_append, attention_merge

def build(kernel, types, constants, arch, **options):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.asm["cubin"], "no machine code"

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
         torch.float8_e4m3fn: "fp8e4nv"}

def paged(arch, dtype, cache_dtype, dims, group):
    shape = attention.Shape.of(64, group, *dims, 16)
    cache, float_type = "*" + NAMES[cache_dtype], "*" + NAMES[dtype]
    types = {"q": float_type, "out": float_type, "lse": "*fp32", "k_cache": cache,
             "v_cache": cache, "tail_bits": "*i64", "k_scales": "*fp32", "v_scales": "*fp32",
             "bad": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("block_table", "intervals", "tail_base", "cu_q", "kv_lens"), "*i32")
    constants = shape.constants | {"HAS_K_SCALES": True, "HAS_V_SCALES": True,
                                   "DOT_TYPE": attention.DOT_TYPES[dtype]}
    build(attention.paged_attention_kernel, types, constants, arch,
          num_warps=shape.num_warps, num_stages=shape.num_stages)

arch = int(sys.argv[1])
paged(arch, torch.bfloat16, torch.bfloat16, (128, 128), 4)
if "soak" in sys.argv:
    paged(arch, torch.float16, torch.float8_e4m3fn, (96, 96), 8)
    paged(arch, torch.float32, torch.float32, (256, 256), 1)
    paged(arch, torch.bfloat16, torch.bfloat16, (576, 512), 16)
build(attention_merge.merge_attention_kernel,
      {"outs": "*fp32", "lses": "*fp32", "out": "*bf16", "lse": "*fp32"},
      {"DIM": 128, "PADDED": 128, "IS_LOG2": False}, arch)
build(attention_append.append_rows_kernel,
      {"rows": "*bf16", "cache": "*fp8e4nv", "slots": "*i64", "cos_sin": "*fp32",
       "scales": "*fp32", "bad": "*i64", "num_slots": "i64"},
      {"BLOCK_SIZE": 16, "DIM": 128, "PADDED": 128, "HAS_ROPE": True, "INTERLEAVED": False,
       "HAS_SCALES": True, "LARGEST": 448.0}, arch)
"""


@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch, tmp_path, soak):
    if importlib.util.find_spec("triton") is None:
        skip("triton", "triton is not installed")
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arch), "soak" if soak else ""],
        capture_output=True, text=True, env=variables, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
