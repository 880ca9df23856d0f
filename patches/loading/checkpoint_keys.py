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


_OF_4_BITS = re.compile(r"\.weight\.quant_state\.bitsandbytes__\w+$")
_OF_INT8 = re.compile(r"(?<=\.)SCB$")


def read_headers(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None) -> dict[str, StoredTensor] | None:
    """Each tensor of the checkpoint by its name in the files; None if there is nothing that can be read."""
    if state_dict is not None:
        return {
            name: StoredTensor(tensor.is_floating_point(), tuple(tensor.shape)) for name, tensor in state_dict.items()
        }
    if not files:
        return None
    found: dict[str, StoredTensor] = {}
    for file in map(str, files):
        if file.endswith(".safetensors"):
            found.update(_in_safetensors(file))
        elif file.endswith((".bin", ".pt", ".pth")):
            found.update(_in_pickle(file))
        else:
            return None
    return found


def tensor_names(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None) -> Iterator[str]:
    """The names of the tensors alone; none of files in another format."""
    if state_dict is not None:
        yield from state_dict
        return
    for file in map(str, files or ()):
        if file.endswith(".safetensors"):
            with open_safetensors(file) as handle:
                yield from handle.keys()
        elif file.endswith((".bin", ".pt", ".pth")):
            yield from _in_pickle(file)


def map_tensors(files: Iterable[str] | None, state_dict: Mapping[str, Any] | None, wanted: set[str]) -> dict[str, Any]:
    """The tensors ``wanted``, which stay in the files: they are mapped, not copied."""
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
    """The first of ``files``, if all of them are whole: safetensors say how long they are, an archive ends with its index."""
    for file in files:
        if file.endswith(".safetensors"):
            with open_safetensors(file):
                pass
        elif _is_cut_short(file):
            raise OSError(
                f"{file} ({os.path.getsize(file)} bytes) is not a complete file of torch.save. Download or copy it again."
            )
    return files[0]


def _is_cut_short(file: str) -> bool:
    with open(file, "rb") as opened:
        return opened.read(4) == b"PK\3\4" and not zipfile.is_zipfile(file)


def open_safetensors(file: str) -> Any:
    """``safe_open`` with an error that names the file."""
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


def _in_pickle(file: str) -> dict[str, StoredTensor]:
    import torch

    state = torch.load(file, map_location="meta", weights_only=True)
    return {name: StoredTensor(tensor.is_floating_point(), tuple(tensor.shape)) for name, tensor in state.items()}


def quantized_names(keys: Iterable[str]) -> list[str]:
    """Names of the weights that have a quantization state among ``keys``."""
    found = []
    for key in keys:
        if _OF_4_BITS.search(key):
            found.append(_OF_4_BITS.sub(".weight", key))
        elif _OF_INT8.search(key):
            found.append(_OF_INT8.sub("weight", key))
    return found


def names_in_model(
    model: Any, keys: list[str], weights: Iterable[str], asked: dict[str, str] | None = None
) -> dict[str, str]:
    """The names that ``model`` has for ``weights`` of a checkpoint whose tensors are ``keys``.

    ``asked`` is the ``key_mapping`` of ``from_pretrained``.
    """
    names = _renamed_by_4 if hasattr(model, "_get_key_renaming_mapping") else _renamed_by_5
    return names(model, keys, sorted(weights), asked)  # some renamings of transformers 5 depend on the order


def _renamed_by_5(model: Any, keys: list[str], weights: list[str], asked: dict[str, str] | None) -> dict[str, str]:
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


def _renamed_by_4(model: Any, keys: list[str], weights: list[str], asked: dict[str, str] | None) -> dict[str, str]:
    prefix = model.base_model_prefix
    has, expects = any(key.startswith(prefix) for key in keys), hasattr(model, prefix)
    whole, base = bool(prefix) and has and not expects, bool(prefix) and not has and expects
    renamed: dict[str, str] = model._get_key_renaming_mapping(weights, asked, whole, base)
    return renamed
