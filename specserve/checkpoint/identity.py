"""Whether two folders, perhaps of two machines, hold the same model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from specserve.errors import ModelError
from specserve.files import open_file

# What tokens and logits depend on; not what only says how to talk to it (templates, sampling values).
_FILES = ("config.json", "quant*_config.json", "tokenizer.json", "tokenizer.model", "*.safetensors", "*.bin", "*.pt")
_PIECE_BYTES = 2**16
_NUM_PIECES = 64


def model_digest(folder: Path) -> str:
    """The same for the same files, wherever they lie, hex. Files of up to 4 MiB are read whole; of larger ones 64
    pieces of 64 KiB, spread evenly: weights that were trained differ everywhere. Against mistakes, and not against an
    attacker. Raises ModelError for a file that cannot be read."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                whole.update(f"{path.name}\0{size}\0".encode())
                spread = max(0, size - _PIECE_BYTES)
                for number in range(_NUM_PIECES):
                    start = (
                        number * _PIECE_BYTES
                        if size <= _NUM_PIECES * _PIECE_BYTES
                        else (spread * number // (_NUM_PIECES - 1))
                    )
                    file.seek(start)
                    whole.update(file.read(_PIECE_BYTES))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}.") from error
    return whole.hexdigest()
