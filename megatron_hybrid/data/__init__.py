"""Text in, Megatron's indexed datasets out; and a check of such a dataset before training starts on it.

Nothing here imports Megatron: the dataset builder is handed in by ``scripts/prepare_data.py``.
"""

from .check import DatasetInfo, check_data_paths, check_dataset
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "DatasetInfo",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "check_data_paths",
    "check_dataset",
]
