"""The kernels compiled ahead of time, without a GPU: registers, spills and shared memory.

In: a `Configuration`. Out: its `Figures`, read from the binary with a tool that triton carries. As
a command, `scripts/kernel_figures`, it prints the table of all configurations.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from cacheslide_agents.errors import BackendError
from cacheslide_agents.position.kernels.launch import Tiling, power_of_two

ARCHITECTURES = (80, 90)
HEAD_DIMS = (64, 80, 96, 128)
POSITIONS = 64
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_INT32, _FLOAT32 = ("rows", "slots", "borders"), ("factors", "mass")
_TENSORS = ("query", "key", "value", "embedding", "output")
_ANY_NUMBER = ("row_count", "masses", "each", "last")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a kernel is compiled for. `rows` is how many rows a launch has: few make small tiles."""

    architecture: int
    dtype: torch.dtype
    head_dim: int
    contextual: bool
    masses: bool = False
    slotted: bool = False
    rows: int = 4096

    @property
    def tiling(self) -> Tiling:
        return Tiling.of(self.rows, self.head_dim, self.dtype, self.contextual)


@dataclass(frozen=True, slots=True)
class Figures:
    """Per thread: registers and bytes spilled; per program: bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def configurations() -> Iterator[Configuration]:
    """What models ask for: long prompts and single tokens, on every architecture."""
    for architecture, dtype, head_dim in product(ARCHITECTURES, _TYPES, HEAD_DIMS):
        yield Configuration(architecture, dtype, head_dim, contextual=False)
        yield Configuration(architecture, dtype, head_dim, contextual=True)
        yield Configuration(architecture, dtype, head_dim, contextual=True, rows=1)
        yield Configuration(architecture, dtype, head_dim, contextual=True, masses=True)


def compile_kernel(configuration: Configuration) -> Figures:
    """Compile the attention kernel and look at the result. `BackendError` without triton."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from cacheslide_agents.position.kernels import scan
    except ImportError as error:
        raise BackendError(f"compiling kernels needs triton ({error})") from error
    kernel = scan.row_attention
    constants = _constants(configuration)
    types = {name: _type(name, configuration, constants) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name] not in ("constexpr", "fp32") and name not in _ANY_NUMBER
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants, aligned),
        target=GPUTarget("cuda", configuration.architecture, 32),
        options=configuration.tiling.options(),
    )
    registers, spilled = _used(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return Figures(registers, spilled, compiled.metadata.shared)


def _constants(configuration: Configuration) -> dict[str, Any]:
    tiling = configuration.tiling
    constants: dict[str, Any] = {
        "GROUPS": 4,
        "DIM": configuration.head_dim,
        "WIDTH": power_of_two(configuration.head_dim),
        "CONTEXTUAL": configuration.contextual,
        "NPOS": power_of_two(POSITIONS),
        "MASSES": configuration.masses,
        "NEAR": tiling.near,
        "SLOTTED": configuration.slotted,
        "PAGE_SIZE": 0,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "PRECISION": "ieee",
    }
    absent = {
        "slots": not configuration.slotted,
        "embedding": not configuration.contextual,
        "borders": not configuration.masses,
        "factors": not configuration.masses,
    }
    return constants | {name: None for name, missing in absent.items() if missing}


def _type(name: str, configuration: Configuration, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _TENSORS:
        return f"*{_TYPES[configuration.dtype]}"
    if name in _INT32:
        return "*i32"
    if name in _FLOAT32:
        return "*fp32"
    return "fp32" if name == "scale" else "i32"


def _used(cubin: bytes, cuobjdump: str) -> tuple[int, int]:
    """Registers and bytes of stack, which triton's kernels need for nothing but spills."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        command = [cuobjdump, "--dump-resource-usage", str(binary)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (registers,), (stack,) = (re.findall(rf"\b{name}:(\d+)", said) for name in ("REG", "STACK"))
    return int(registers), int(stack)


def main() -> None:
    """One line per configuration."""
    print("sm  dtype     head  kind           tile       warps  registers  spilled  shared KiB")
    for each in configurations():
        tiling, figures = each.tiling, compile_kernel(each)
        kind = "masked" if not each.contextual else "CoPE+masses" if each.masses else "CoPE"
        tile = f"{tiling.rows}x{tiling.keys}/{tiling.near}"
        print(
            f"{each.architecture}  {_TYPES[each.dtype]:8}  {each.head_dim:4}  {kind:13}"
            f"  {tile:9}  {tiling.warps:5}  {figures.registers:9}  {figures.spilled:7}"
            f"  {figures.shared / 1024:10.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
