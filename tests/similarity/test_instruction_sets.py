"""The C++ of hamming_match under the sanitizers, with every instruction set of this machine."""

from pathlib import Path

from ..cxx import build, run


def test_hamming_match_on_every_instruction_set(tmp_path):
    result = run(build(Path(__file__).with_suffix(".cc"), [], tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    assert "plain" in result.stdout
