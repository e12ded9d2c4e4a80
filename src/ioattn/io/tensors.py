"""Tensors from .npy and .safetensors files, read without extra packages where that is a page of code."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

_SAFETENSORS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def read_tensor(path: Path, name: str) -> Tensor:
    """The tensor in a .npy file, or the one called `name` in a .safetensors file.

    Raises:
        ValueError: if the file is neither, lacks the tensor or is cut short.
        ModuleNotFoundError: for a .npy file without numpy, saying how to get it.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path, name)
    if path.suffix != ".npy":
        raise ValueError(f"{path} is no tensor file; it must end in .npy or .safetensors")
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise ModuleNotFoundError("reading .npy files needs numpy: pip install 'ioattn[viz]'") from None
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _read_safetensors(path: Path, name: str) -> Tensor:
    data = path.read_bytes()
    header_size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    try:
        header = json.loads(data[8 : 8 + header_size])
    except ValueError:
        raise ValueError(f"{path} is no .safetensors file: its header is not JSON") from None
    names = sorted(key for key in header if key != "__metadata__")
    if name not in names:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; it must hold {name}")
    entry = header[name]
    if entry["dtype"] not in _SAFETENSORS:
        raise ValueError(f"{path}: {name} is {entry['dtype']}; it must be one of {', '.join(_SAFETENSORS)}")
    start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
    if stop > len(data):
        raise ValueError(f"{path} ends at byte {len(data)}; {name} would end at {stop}")
    return torch.frombuffer(bytearray(data[start:stop]), dtype=_SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
