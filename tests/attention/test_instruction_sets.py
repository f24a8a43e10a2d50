"""The C++ of paged attention under the sanitizers, with every instruction set of this machine."""

from pathlib import Path

from ..cxx import build, run

ATTEND = ("portable", "avx2", "avx512", "avx512_bf16")
SOURCES = [f"attention/attend_{name}.cc" for name in ATTEND]
SOURCES += ["attention/paged_attention.cc", "common/element_rows.cc"]


def test_paged_attention_on_every_instruction_set(tmp_path):
    program = build(Path(__file__).with_suffix(".cc"), SOURCES, tmp_path)
    result = run(program)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "portable" in result.stdout
