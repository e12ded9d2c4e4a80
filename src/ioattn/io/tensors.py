"""Tensors from .npy and .safetensors files, read without extra packages where that is a page of code."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

_SAFETENSORS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def read_tensor(path: Path, name: str) -> Tensor:
    """The tensor in a .npy file, or the one called `name` in a .safetensors file.

    Raises:
        ValueError: if the file is neither, does not exist, lacks the tensor, is cut short or holds no floats.
        ModuleNotFoundError: for a .npy file without numpy, saying how to get it.
    """
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} is no tensor file; it must end in .npy or .safetensors")
    if not path.is_file():
        raise ValueError(f"{path} is not there; {name} must be a .npy or .safetensors file")
    return _read_safetensors(path, name) if path.suffix == ".safetensors" else _read_npy(path)


def _read_npy(path: Path) -> Tensor:
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise ModuleNotFoundError("reading .npy files needs numpy: pip install 'ioattn[viz]'") from None
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file: {error}") from None
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise ValueError(f"{path} holds {array.dtype}; it must be float16, float32 or float64")
    # Torch knows neither the other byte order nor negative strides.
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def _read_safetensors(path: Path, name: str) -> Tensor:
    data = path.read_bytes()
    start = 8 + (struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0)
    try:
        header = json.loads(data[8:start])
        names = sorted(key for key in header if key != "__metadata__")
        kinds = {key: (header[key]["dtype"], header[key]["shape"], header[key]["data_offsets"]) for key in names}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no .safetensors file: its header cannot be read") from None
    if name not in kinds:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; it must hold {name}")
    dtype, shape, offsets = kinds[name]
    if dtype not in _SAFETENSORS:
        raise ValueError(f"{path}: {name} is {dtype}; it must be one of {', '.join(_SAFETENSORS)}")
    first, last = (start + offset for offset in offsets)
    if last > len(data):
        raise ValueError(f"{path} ends at byte {len(data)}; {name} would end at {last}")
    if math.prod(shape) * _SAFETENSORS[dtype].itemsize != last - first:
        raise ValueError(
            f"{path}: {name} has shape {tuple(shape)} and {last - first} bytes, which do not fit each other"
        )
    values = torch.empty(shape, dtype=_SAFETENSORS[dtype])
    if values.numel():
        values.copy_(torch.frombuffer(bytearray(data[first:last]), dtype=values.dtype).reshape(shape))
    return values
