"""Write a random model of a given shape, with a vocabulary of a few hundred tokens: for measuring what steps of larger
models cost where the models themselves are not at hand. The default is the shape of Qwen2.5-1.5B. An architecture that
is not native, as stablelm, is written as transformers makes it.

    python benchmarks/random_model.py FOLDER
    specserve bench verify-cost --model FOLDER --quantization int4
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.models.loader import native_model_types
from specserve.testing import write_tiny_model
from specserve.testing.causal_models import write_tiny_causal_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", default="qwen2")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=8960)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--experts", type=int, help="of each layer, of --intermediate features each (mixtral)")
    parser.add_argument("--experts-per-token", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    given = parse()
    experts = {"num_local_experts": given.experts, "num_experts_per_tok": given.experts_per_token}
    write = write_tiny_model if given.architecture in native_model_types() else write_tiny_causal_model
    write(
        given.folder,
        given.architecture,
        num_hidden_layers=given.layers,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        head_dim=given.head_dim,
        **(experts if given.experts else {}),
    )


if __name__ == "__main__":
    main()
