"""A stand-in for vLLM's FP8 kernels on CPUs without AMX, where it has none for blocks of 128 x 128.

Only the product of matrices is a stand-in: it widens the codes, multiplies by the scales and multiplies
matrices in float32. vLLM's own loader, layers and steps after loading are around it, as around its Triton
kernel, which leaves weights as they are loaded too.
"""

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import fp8, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4,
    compressed_tensors_w8a8_mxfp8,
)
from vllm.platforms import PlatformEnum


class WidenedBlocks(Fp8BlockScaledMMLinearKernel):
    """Multiplies by weights that it widens anew each time."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:  # noqa: N803
        scales = Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = B.to(torch.float32) * scales[: B.shape[0], : B.shape[1]]
        return (A.to(torch.float32) @ weight.t()).to(self.config.out_dtype)


def register() -> None:
    """Have vLLM choose it; again changes nothing."""
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if WidenedBlocks not in kernels:
        kernels.insert(0, WidenedBlocks)


def choose_emulation() -> None:
    """Have vLLM use what it has for any device in MXFP8 and NVFP4, and load MXFP4 experts for it.

    These experts need a package that is not there, so such models cannot answer.
    """
    compressed_tensors_w8a8_mxfp8.init_mxfp8_linear_kernel = lambda weight_shape: (
        linear.EmulationMxfp8LinearKernel(linear.Mxfp8LinearLayerConfig(weight_shape))
    )
    compressed_tensors_w4a4_nvfp4.init_nvfp4_linear_kernel = lambda **_: linear.EmulationNvFp4LinearKernel(
        linear.NvFp4LinearLayerConfig()
    )
    mxfp4.select_mxfp4_moe_backend = lambda *_: (Mxfp4MoeBackend.EMULATION, None)


def choose_triton_for_experts() -> None:
    """Have vLLM load FP8 experts for its Triton kernel, which a CPU cannot run: such models cannot answer."""
    choice = Fp8MoeBackend.TRITON, TritonExperts
    for module in (fp8, compressed_tensors_moe_w8a8_fp8):
        module.select_fp8_moe_backend = lambda **_: choice
