"""Runs the fused kernels in triton's interpreter, in a process of its own.

In, on standard input: one path per line, of a file of keyword arguments saved by torch. Out: "done"
or "failed" and why, one line each; the output lies beside the file as `<file>.out`. The interpreter
must be asked for before triton is imported anywhere, hence the process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter

from cacheslide_agents.position.contextual import CanonicalMass
from cacheslide_agents.position.kernels import Tiling, fused_attention


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as integers and would multiply those."""
    builder: Any = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != interpreter.tl.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain(self, widened(left), widened(right), *others)

    builder.create_dot = create_dot


def main() -> None:
    torch.set_num_threads(1)
    multiply_bfloat16()
    for line in sys.stdin:
        path = line.strip()
        given = torch.load(path)
        given["masses"] = [CanonicalMass(*mass) for mass in given.get("masses", ())]
        given["tiling"] = Tiling(*given["tiling"]) if given.get("tiling") else None
        try:
            torch.save(fused_attention(**given), path + ".out")
            print("done", flush=True)
        except Exception as error:
            print("failed", repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
