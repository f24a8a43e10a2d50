"""The Triton kernels compiled for GPUs that this machine lacks: Triton's compiler, then ptxas.

The resources that they need must exist on the GPU: Triton checks only at launch. Covers each head
dim and dtype once, with --soak more of their pairs. Runs in a separate process, because functions
decorated by the interpreter cannot be compiled.
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

from mooncake_kernels.triton import attention, attention_append, attention_merge, kv

MOST_SHARED, MOST_TENSOR_COLUMNS = 232_448, 512  # of a program, on sm_90 and sm_100

def build(kernel, types, constants, arch, aligned=(), **options):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= {name: "constexpr" for name in constants}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.asm["cubin"], "no machine code"
    return compiled.metadata

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
         torch.float8_e4m3fn: "fp8e4nv"}

def paged(arch, queries, dtype, cache_dtype, dims, group, is_aligned=True):
    all_types = (dtype, cache_dtype, cache_dtype)
    shape = attention.Shape.of(queries, group, dims, 16, all_types)
    dot_type = attention.DOT_TYPES[attention.dot_type(all_types)]
    cache, float_type = "*" + NAMES[cache_dtype], "*" + NAMES[dtype]
    types = {"q": float_type, "out": float_type, "lse": "*fp32", "k_cache": cache,
             "v_cache": cache, "tail_bits": "*i64", "k_scales": "*fp32", "v_scales": "*fp32",
             "bad": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("block_table", "intervals", "tail_base", "cu_q", "kv_lens"), "*i32")
    constants = shape.constants | {"HAS_K_SCALES": True, "HAS_V_SCALES": True,
                                   "DOT_TYPE": dot_type}
    kernel = attention.paged_attention_kernel
    # As a launch finds them, mostly: then tiles are copied ahead, which takes more.
    aligned = [name for name in kernel.arg_names if is_aligned and name not in constants and
               (types.get(name, "").startswith("*") or name.endswith("_stride"))]
    found = build(kernel, types, constants, arch, aligned,
                  num_warps=shape.num_warps, num_stages=shape.num_stages)
    what = f"sm_{arch} {dtype} {cache_dtype} {dims} group {group}: {constants}"
    assert found.shared <= MOST_SHARED, f"{found.shared} bytes of shared memory, {what}"
    columns = getattr(found, "tmem_size", 0) or 0
    assert columns <= MOST_TENSOR_COLUMNS, f"{columns} columns of tensor memory, {what}"

BF16, FP16, FP32, FP8 = NAMES
MLA = (576, 512)
# queries of a request, q, caches, dims, group
CASES = [
    (64, BF16, BF16, (128, 128), 4),
    (1, FP16, FP8, (96, 96), 8),
    (1, FP32, FP32, (64, 64), 1),
    (1, BF16, BF16, (256, 256), 16),
    (1, BF16, FP8, MLA, 128),
]
MORE_CASES = [
    (1, BF16, BF16, MLA, 128),
    (64, BF16, BF16, MLA, 16),
    (1, BF16, BF16, MLA, 100),
    (1, BF16, FP32, MLA, 128),
    (1, FP32, FP32, MLA, 128),
    (1, FP32, BF16, MLA, 64),
    (64, BF16, BF16, (256, 256), 128),
    (64, FP32, FP32, (256, 256), 1),
    (64, BF16, FP32, (256, 256), 4),
    (64, FP16, FP16, (128, 128), 200),
    (64, FP32, FP32, (128, 128), 4),
    (64, BF16, FP32, (128, 128), 4),
    (64, BF16, BF16, (64, 1024), 64),
    (1, FP32, FP32, (1024, 1024), 8),
]

# An engine's next batch must not compile: whether one of its sizes is 1, or divisible by 16, is
# not looked at, so all have one type.
BATCH_SIZES = {
    attention.paged_attention_kernel:
        {"num_q", "num_requests", "num_blocks", "max_blocks", "split_keys"},
    attention_merge.merge_attention_kernel: {"num_parts", "num_rows"},
    kv.copy_blocks_kernel: {"num_src_ids", "num_dst_ids"},
}
for kernel, names in BATCH_SIZES.items():
    unlooked = {each.name for each in kernel.params if each.do_not_specialize}
    assert unlooked == names, (kernel, unlooked)

arch = int(sys.argv[1])
for case in CASES:
    paged(arch, *case)
if "soak" in sys.argv:
    for case in MORE_CASES:
        paged(arch, *case)
        paged(arch, *case, is_aligned=False)
build(attention_merge.merge_attention_kernel,
      {"outs": "*fp32", "lses": "*fp32", "out": "*bf16", "lse": "*fp32"},
      {"DIM": 128, "PADDED": 128, "IS_LOG2": False}, arch)
build(attention_append.append_rows_kernel,
      {"rows": "*bf16", "cache": "*fp8e4nv", "slots": "*i64", "cos_sin": "*fp32",
       "scales": "*fp32", "bad": "*i64", "num_slots": "i64"},
      {"BLOCK_SIZE": 16, "DIM": 128, "PADDED": 128, "HAS_ROPE": True, "INTERLEAVED": False,
       "HAS_SCALES": True, "LARGEST": 448.0}, arch)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("arch", [90, 100])
def test_kernels_compile_within_device_limits(arch, tmp_path, soak):
    if importlib.util.find_spec("triton") is None:
        skip("triton", "triton is not installed")
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arch), "soak" if soak else ""],
        capture_output=True, text=True, env=variables, timeout=6000 if soak else 900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
