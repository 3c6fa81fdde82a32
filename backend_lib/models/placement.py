"""Where a decoder lives and in what form, as the settings say."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from backend_lib.checkpoint import Checkpoint, DecoderConfig, HashConfig
from backend_lib.config import Settings, gpu_is_visible
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Step
from backend_lib.models.linear import QUANTISED, has_vector_kernels

log = logging.getLogger("tandem")

MIN_CAPABILITY = (8, 0)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Placement(NamedTuple):
    """Attributes:
    device: where weights, keys and values are.
    weights: the format of linear layers; `dense` is the type itself.
    dtype: of dense weights, keys and values: float32 on a CPU.
    by_kernels: whether steps are computed by Triton kernels.
    """

    device: torch.device
    weights: str
    dtype: torch.dtype
    by_kernels: bool


def place(settings: Settings, checkpoint: Checkpoint) -> Placement:
    """Raises ValueError naming a setting that this machine, or its kind of device, cannot follow."""
    kind = "cpu" if isinstance(checkpoint.config, HashConfig) else _kind(settings.device)
    if kind == "cpu":
        _check(settings, "dtype", ("auto", "float32"), "a CPU")
        return Placement(torch.device("cpu"), weight_format(settings), torch.float32, False)
    _check(settings, "weights", ("auto",), "a GPU, where 'dtype' is the type of the weights")
    if kind == "interpret":
        _check(settings, "dtype", ("auto", "float32", "float16"), "Triton's interpreter")
        os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is first imported
        return Placement(torch.device("cpu"), "dense", DTYPES.get(settings.dtype, torch.float32), True)
    return Placement(torch.device("cuda"), "dense", DTYPES.get(settings.dtype, torch.bfloat16), True)


def _kind(setting: str) -> str:
    """`cpu`, `cuda` or `interpret`."""
    if setting not in ("auto", "cuda"):
        return setting
    trouble = _trouble_with_cuda()
    if not trouble:
        return "cuda"
    if setting == "cuda":
        raise ValueError(f"parameter 'device' is 'cuda', but {trouble}")
    if gpu_is_visible():
        log.warning("computing on the CPU, though there is a GPU: %s", trouble)
    return "cpu"


def _trouble_with_cuda() -> str:
    """Why there is no GPU to compute on; empty where there is."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU that its CUDA {torch.version.cuda} can use"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; 8.0 is needed"
    return ""


def _check(settings: Settings, name: str, allowed: tuple[str, ...], where: str) -> None:
    value = getattr(settings, name)
    if value not in allowed:
        raise ValueError(f"parameter '{name}' is '{value}'; allowed on {where} are {', '.join(allowed)}")


def weight_format(settings: Settings) -> str:
    """The setting `weights` on a CPU; `fp16` for `auto` where it lacks instructions for less.

    Raises ValueError when the setting asks for what the CPU lacks.
    """
    if settings.weights not in QUANTISED or has_vector_kernels():
        return settings.weights
    if settings.weights == "auto":
        return "fp16"
    raise ValueError(f"parameter 'weights' is '{settings.weights}', which needs an x86-64 CPU with AVX2, FMA and F16C")


def step_maker(placement: Placement, config: DecoderConfig, settings: Settings) -> Callable[[ForwardBatch], Step]:
    """What computes a step there. Triton is imported only for that: it takes 70 MiB."""
    if not placement.by_kernels:
        from backend_lib.models.eager import EagerStep

        return EagerStep
    from backend_lib.models.kernel_step import KernelStep, KernelWorkspace

    workspace = KernelWorkspace(
        config, max_decodes=settings.max_running, max_tokens=settings.max_running + settings.prefill_chunk,
        dtype=placement.dtype, device=placement.device,
    )  # fmt: skip
    return lambda batch: KernelStep(batch, workspace, placement.dtype)
