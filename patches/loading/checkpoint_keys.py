"""What the files of a checkpoint hold, read from their headers, and by which names a model knows it."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    floating: bool
    shape: tuple[int, ...]


_STATE_OF_4_BIT = re.compile(r"\.weight\.quant_state\.bitsandbytes__\w+$")
_SCALES_OF_INT8 = re.compile(r"(?<=\.)SCB$")


def read_headers(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None) -> dict[str, StoredTensor] | None:
    """Read what each tensor of a checkpoint is, by its name there; None if it has no files, or files in another format."""
    if state_dict is not None:
        return _stored_tensors(state_dict)
    if not files:
        return None
    found: dict[str, StoredTensor] = {}
    for file in map(str, files):
        if file.endswith(".safetensors"):
            found.update(_in_safetensors(file))
        elif file.endswith((".bin", ".pt", ".pth")):
            import torch

            found.update(_stored_tensors(torch.load(file, map_location="meta", weights_only=True)))
        else:
            return None
    return found


def tensor_names(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the names of the tensors, file by file: a caller that stops early opens no other file."""
    if state_dict is not None:
        yield from state_dict
        return
    for file in files or ():
        yield from read_headers([file], None) or ()


def map_tensors(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None, wanted: set[str]) -> dict[str, Any]:
    """Map the tensors ``wanted`` into memory: they stay in the files, and are not copied."""
    if state_dict is not None:
        return {name: state_dict[name] for name in wanted}
    found: dict[str, Any] = {}
    for file in map(str, files or ()):
        if file.endswith(".safetensors"):
            with open_safetensors(file) as handle:
                found.update((name, handle.get_tensor(name)) for name in wanted.intersection(handle.keys()))
        elif file.endswith((".bin", ".pt", ".pth")):
            import torch

            mapped = zipfile.is_zipfile(file)  # a file of torch before 1.6 is none
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
            found.update((name, state[name]) for name in wanted.intersection(state))
    return found


def check_whole_files(files: list[str]) -> str:
    """Return the first of ``files``, or raise an error that names a truncated one.

    safetensors say how long they are, an archive ends with its index.
    """
    for file in files:
        if file.endswith(".safetensors"):
            with open_safetensors(file):
                pass
            continue
        with open(file, "rb") as opened:
            is_archive = opened.read(4) == b"PK\3\4"
        if is_archive and not zipfile.is_zipfile(file):
            raise OSError(
                f"{file} ({os.path.getsize(file)} bytes) is not a complete file of torch.save. Download or copy it again."
            )
    return files[0]


def open_safetensors(file: str) -> Any:
    """Call ``safe_open``; an error names the file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise SafetensorError(
            f"{error}: {file} ({os.path.getsize(file)} bytes) is not a complete safetensors file. Download or copy it again."
        ) from error


def _in_safetensors(file: str) -> dict[str, StoredTensor]:
    with open_safetensors(file) as handle:
        slices = ((name, handle.get_slice(name)) for name in handle.keys())
        return {
            name: StoredTensor(part.get_dtype().startswith(("F", "BF")), tuple(part.get_shape()))
            for name, part in slices
        }


def _stored_tensors(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(tensor.is_floating_point(), tuple(tensor.shape)) for name, tensor in state.items()}


def quantized_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the weights that have a quantization state among ``keys``."""
    found = []
    for key in keys:
        if _STATE_OF_4_BIT.search(key):
            found.append(_STATE_OF_4_BIT.sub(".weight", key))
        elif _SCALES_OF_INT8.search(key):
            found.append(_SCALES_OF_INT8.sub("weight", key))
    return found


def names_in_model(
    model: Any, keys: list[str], weights: Iterable[str], asked: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the names that ``model`` has for ``weights`` of a checkpoint whose tensors are ``keys``.

    ``asked`` is the ``key_mapping`` of ``from_pretrained``.
    """
    ordered = sorted(weights)  # some renamings of transformers 5 depend on the order
    if not hasattr(model, "_get_key_renaming_mapping"):
        return _renamed_by_5(model, ordered, asked)
    prefix = model.base_model_prefix
    has, expects = any(key.startswith(prefix) for key in keys), hasattr(model, prefix)
    whole, base = bool(prefix) and has and not expects, bool(prefix) and not has and expects
    renamed: dict[str, str] = model._get_key_renaming_mapping(ordered, asked, whole, base)
    return renamed


def _renamed_by_5(model: Any, weights: list[str], asked: dict[str, str] | None) -> dict[str, str]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(model, asked, None)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    parameters, prefix = model.state_dict(), model.base_model_prefix
    names = {}
    for weight in weights:
        name, _ = rename_source_key(weight, renamings, converters, prefix, parameters)
        if name not in parameters and weight in parameters:
            name = weight
        names[weight] = name
    return names
