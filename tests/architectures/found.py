"""The architectures: found by walking the mappings of the installed transformers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

MAPPINGS = {
    "text": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence-to-sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "speech (CTC)": "MODEL_FOR_CTC_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "text classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""What an architecture is for, and the mapping that has it, in the order in which they are run."""


class Architecture(NamedTuple):
    """One class of models, by the first mapping that has it."""

    purpose: str
    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.purpose}: {self.class_name} ({self.model_type})"

    @property
    def kind(self) -> Any:
        import transformers

        return getattr(transformers, self.class_name)


def everything() -> list[Architecture]:
    """Each pair of a configuration and a class of models once."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Architecture] = {}
    for purpose, mapping in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault((model_type, name), Architecture(purpose, model_type, name))
    return list(found.values())


def some(architectures: list[Architecture], count: int, seed: int) -> list[Architecture]:
    """``count`` of ``architectures``, drawn by ``seed``."""
    return random.Random(seed).sample(architectures, min(count, len(architectures)))
