"""Weights from other systems into ours, and from ours into others; `scripts/convert.py` is the command.

| format | what it is | in memory | on disk |
| --- | --- | --- | --- |
| marian | MarianMT of transformers (Helsinki-NLP) | `from_marian`, `to_marian` | read, write |
| fsmt | FSMT of transformers (wmt19) | `from_fsmt` | read |
| fairseq | translation Transformers of fairseq, `.pt` | `from_fairseq` | read |
| torch_nn | `torch.nn.Transformer` with embeddings | `from_torch_nn`, `to_torch_nn` | read, write |
| annotated | "The Annotated Transformer", a state dict | `from_annotated` | read |
| tensor2tensor | variables of tensor2tensor, `.npz` | `from_tensor2tensor` | read |
| opennmt | OpenNMT-py 1 to 3, `.pt` | `from_opennmt` | read |
| ctranslate2 | CTranslate2's folder | `from_ctranslate2`, `to_ctranslate2` (from and to folders) | read, write |
| onnx | encoder and decoder graphs for onnxruntime | `to_onnx` (to a folder) | write |
| vanilla | this package's checkpoint folder | `from_pretrained`, `save_pretrained` | read, write |

Each format is a module of its name here with a rename table; its docstring says what carries over and what is refused.
`FORMATS[name].load()` is the module, with `read(path, **options) -> (model, tokenizer or None)`, `write(model,
tokenizer, folder, **options)`, or both. What does not fit raises a `ConversionError`, and nothing is written.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .annotated import from_annotated
    from .ctranslate2 import from_ctranslate2, to_ctranslate2
    from .fairseq import from_fairseq
    from .fsmt import from_fsmt
    from .marian import from_marian, to_marian
    from .onnx import to_onnx
    from .opennmt import from_opennmt
    from .renaming import ConversionError
    from .tensor2tensor import from_tensor2tensor
    from .torch_nn import from_torch_nn, to_torch_nn


@dataclass(frozen=True)
class Format:
    """A format on disk, and the ways that it goes.

    Args:
        module: Name of its module in this package.
        reads: Whether the module has `read`.
        writes: Whether it has `write`.
    """

    module: str
    reads: bool = True
    writes: bool = False

    def load(self) -> Any:
        """Return the module; it loads torch and transformers."""
        return importlib.import_module(f".{self.module}", __name__)


FORMATS = {
    "annotated": Format("annotated"),
    "ctranslate2": Format("ctranslate2", writes=True),
    "fairseq": Format("fairseq"),
    "fsmt": Format("fsmt"),
    "marian": Format("marian", writes=True),
    "onnx": Format("onnx", reads=False, writes=True),
    "opennmt": Format("opennmt"),
    "tensor2tensor": Format("tensor2tensor"),
    "torch_nn": Format("torch_nn", writes=True),
    "vanilla": Format("vanilla", writes=True),
}

_LAZY = {
    "ConversionError": "renaming",
    "from_annotated": "annotated",
    "from_ctranslate2": "ctranslate2",
    "from_fairseq": "fairseq",
    "from_fsmt": "fsmt",
    "from_marian": "marian",
    "from_opennmt": "opennmt",
    "from_tensor2tensor": "tensor2tensor",
    "from_torch_nn": "torch_nn",
    "to_ctranslate2": "ctranslate2",
    "to_marian": "marian",
    "to_onnx": "onnx",
    "to_torch_nn": "torch_nn",
}

__all__ = [
    "FORMATS",
    "ConversionError",
    "Format",
    "from_annotated",
    "from_ctranslate2",
    "from_fairseq",
    "from_fsmt",
    "from_marian",
    "from_opennmt",
    "from_tensor2tensor",
    "from_torch_nn",
    "to_ctranslate2",
    "to_marian",
    "to_onnx",
    "to_torch_nn",
]


def __getattr__(name: str) -> Any:
    """Load a converter on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
