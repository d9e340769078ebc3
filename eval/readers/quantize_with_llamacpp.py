"""Let llama.cpp quantize a model: `quantize_with_llamacpp.py SOURCE OUT TYPE`. It reads an F32 file of quantkit's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from places import inherited, python_of  # noqa: E402

import quantkit  # noqa: E402

THERE = """
import sys, llama_cpp
source, out, kind = sys.argv[1:]
asked = llama_cpp.llama_model_quantize_default_params()
asked.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind.upper())
asked.nthread = 1
raise SystemExit(llama_cpp.llama_model_quantize(source.encode(), out.encode(), asked))
"""


def main() -> None:
    source, out, kind = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        quantkit.convert(source, Path(scratch) / "f32", format="gguf", gguf_type="f32", method="rtn")
        (whole,) = (Path(scratch) / "f32").glob("*.gguf")
        Path(out).mkdir()
        command = [str(python_of("llama-cpp")), "-c", THERE, str(whole), str(Path(out) / f"model-{kind}.gguf"), kind]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=inherited())
        if done.returncode:
            raise SystemExit(f"llama.cpp could not quantize: {done.stderr[-1000:]}")


if __name__ == "__main__":
    main()
