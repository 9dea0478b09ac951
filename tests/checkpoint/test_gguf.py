"""GGUF conversion against transformers' loader, against block formats spelled out here, and against broken files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from specserve.checkpoint.catalog import CATALOG
from specserve.checkpoint.gguf import convert
from specserve.checkpoint.gguf_file import ALLOWED_TYPES, read
from specserve.checkpoint.gguf_tokenizer import SPLITTINGS
from specserve.checkpoint.weights import Weights, read_config
from specserve.errors import ModelError
from specserve.text.tokenizer import Tokenizer
from tests.checkpoint.gguf_layouts import add_value

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 7
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
Tensors = dict[str, NDArray[Any]]


def byte_tokens() -> list[str]:
    """The 256 bytes in GPT-2's spelling."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def byte_level_metadata() -> dict[str, Any]:
    # "Ġ 1" and "1 2" show whether digits are split before merging, "a b" whether merging works at all.
    merges = ["a b", "Ġ 1", "1 2", "12 3", "A b"]
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges), *SPECIALS]
    types = [1] * (len(tokens) - len(SPECIALS)) + [3, 3, 3, 4]
    first = len(tokens) - len(SPECIALS)
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": first + 1,
        "eos_token_id": first + 2,
        "add_bos_token": False,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["▁", "h", "i", "▁h", "▁hi", "b", "o", "bo", "▁bo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in (20, 21, 22, 2, 1, 23, 24, 3, 4)]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types, **ids}


def random_tensors(architecture: str, vocab: int, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block_shapes(architecture).items()}
    if architecture != "gemma3":
        shapes["output.weight"] = (vocab, HIDDEN)
    return {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def block_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    return shapes


def architecture_metadata(architecture: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "context_length": 512,
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
    }
    if architecture == "llama":
        metadata["rope.dimension_count"] = HEAD_DIM
    if architecture in ("qwen3", "gemma3"):
        metadata |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    if architecture == "gemma3":
        metadata["attention.sliding_window"] = 32
    return metadata


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: Mapping[str, NDArray[Any]] | None = None,
    kinds: Mapping[str, str] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> Path:
    """A small GGUF file. `kinds` names the type of tensors given as raw blocks; None removes a metadata key."""
    tokenizer = tokenizer or byte_level_metadata()
    tensors = random_tensors(architecture, len(tokenizer["tokens"])) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    entries = {f"{architecture}.{key}": value for key, value in architecture_metadata(architecture).items()}
    entries |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    entries |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in entries.items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind] if kind else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> Path:
    convert(path, path.parent / "out")
    return path.parent / "out"


# --- weights and config against transformers --------------------------------------------------------------------------


def transformers_model(path: Path, config: Any) -> Any:
    """The model of `config` with the tensors as transformers' GGUF loader reads them, float32. (Its `from_pretrained`
    would ask for accelerate; its own reading of the configuration leaves out head sizes.)"""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # when tied
    return model


def meant_config(architecture: str, vocab: int) -> Any:
    """What `architecture_metadata` says, in transformers' terms."""
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {},
        "qwen3": {"head_dim": HEAD_DIM},
        "gemma3": {
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 32,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_local_base_freq": 10000.0,
        },
    }
    return transformers.AutoConfig.for_model(
        "gemma3_text" if architecture == "gemma3" else architecture,
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        tie_word_embeddings=architecture == "gemma3",
        **own[architecture],
    )


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_and_logits_equal_those_of_transformers_gguf_loader(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture)
    folder = converted(path)
    theirs = transformers_model(path, meant_config(architecture, len(byte_level_metadata()["tokens"])))
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = Weights(folder)
    expected = {
        name: value for name, value in theirs.state_dict().items() if name in weights or name != "lm_head.weight"
    }
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids).logits, theirs(ids).logits)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_real_file_gives_the_tensors_and_tokens_transformers_gives(smollm2: Path) -> None:
    source = os.environ.get("SPECSERVE_TEST_GGUF")
    if not source:
        pytest.skip("SPECSERVE_TEST_GGUF does not name the GGUF file of smollm2-135m")
    path = Path(source)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == CATALOG["smollm2-135m"].member_sha256
    theirs = transformers_model(path, transformers.AutoConfig.from_pretrained(smollm2)).state_dict()
    weights = Weights(smollm2)
    assert set(weights) == set(theirs) - {"lm_head.weight"}
    for name, value in weights.items():
        assert torch.equal(value, theirs[name]), name
    tokenizer, other = Tokenizer(smollm2), transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Without digits after spaces: there transformers leaves out this model's splitting of digits.
    for text in (
        "Hello, world!",
        "日本語 ё ñ 👩‍👩‍👧",
        "\tdef f(a,  b):\n",
        "<|im_start|>user\nhi<|im_end|>",
        "x=12345",
    ):
        assert tokenizer.encode(text) == other.encode(text)


def test_the_real_model_has_the_published_config(smollm2: Path) -> None:
    config = read_config(smollm2)
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in expected} == expected
    assert len(Weights(smollm2)) == 272


def test_gemma_norms_are_stored_without_their_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3")
    stored = read(path).tensors["blk.1.post_ffw_norm.weight"].data.view(np.float32)
    found = Weights(converted(path))["model.layers.1.post_feedforward_layernorm.weight"].numpy()
    np.testing.assert_array_equal(found, stored.reshape(-1) - np.float32(1))


def test_a_sliding_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    config = read_config(converted(write_gguf(tmp_path / "m.gguf", llama__attention__sliding_window=128)))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 128)
    assert config["architectures"] == ["MistralForCausalLM"]


def test_an_output_that_repeats_the_embeddings_is_written_once(tmp_path: Path) -> None:
    tensors = random_tensors("llama", 265)
    tensors["output.weight"] = tensors["token_embd.weight"].copy()
    folder = converted(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert read_config(folder)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in Weights(folder)


def test_an_output_of_its_own_stays(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    assert read_config(folder)["tie_word_embeddings"] is False
    assert "lm_head.weight" in Weights(folder)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_become_a_config_entry(tmp_path: Path, factor: float) -> None:
    """The factors as Llama 3's reference code computes them, one frequency at a time."""
    factors = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    tensors = random_tensors("llama", 265) | {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, llama__rope__freq_base=500000.0)
    scaling = read_config(converted(path))["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)
    tensors["rope_freqs.weight"][0] = 1.5
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, llama__rope__freq_base=500000.0)
    with pytest.raises(ModelError, match="rope_freqs"):
        convert(path, tmp_path / "out")


def test_linear_rope_scaling_is_kept_and_others_are_refused(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    config = read_config(converted(write_gguf(tmp_path / "m.gguf", **scaling)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling["llama__rope__scaling__type"] = "dynamic"
    with pytest.raises(ModelError, match=r"'dynamic'.*linear"):
        converted(write_gguf(tmp_path / "m.gguf", **scaling))


# --- tensor types -----------------------------------------------------------------------------------------------------


def nibbles(data: Any) -> list[int]:
    return [int(b) & 15 for b in data] + [int(b) >> 4 for b in data]


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def k_scales(packed: bytes) -> list[tuple[int, int]]:
    """Eight (scale, minimum) pairs of six bits each, in twelve bytes."""
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        low = packed[j + 4]
        pairs.append(((low & 15) | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4))
    return pairs


def q4_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:])]


def q5_0(b: bytes) -> list[float]:
    high = int.from_bytes(b[2:6], "little")
    return [half(b, 0) * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(nibbles(b[6:]))]


def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * int(q) for q in np.frombuffer(b[2:], np.int8)]


def q4_k(b: bytes, high: bytes = bytes(32), start: int = 16) -> list[float]:
    values = []
    for j, (scale, minimum) in enumerate(k_scales(b[4:16])):
        part = b[start + 32 * (j // 2) : start + 32 * (j // 2) + 32]
        for i, byte in enumerate(part):
            q = (byte >> 4 if j % 2 else byte & 15) + 16 * (high[i] >> j & 1)
            values.append(half(b, 0) * scale * q - half(b, 2) * minimum)
    return values


def q5_k(b: bytes) -> list[float]:
    return q4_k(b, b[16:48], 48)


def q6_k(b: bytes) -> list[float]:
    scales = np.frombuffer(b[192:208], np.int8)
    values = []
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        low = b[64 * part + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
        high = b[128 + 32 * part + lane] >> (2 * quarter) & 3
        values.append(half(b, 208) * int(scales[i // 16]) * ((low | high << 4) - 32))
    return values


# Values in a block, bytes in it, where its half-precision numbers lie, and what it means.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    "Q4_0": (32, 18, (0,), q4_0),
    "Q4_1": (32, 20, (0, 2), q4_1),
    "Q5_0": (32, 22, (0,), q5_0),
    "Q8_0": (32, 34, (0,), q8_0),
    "Q4_K": (256, 144, (0, 2), q4_k),
    "Q5_K": (256, 176, (0, 2), q5_k),
    "Q6_K": (256, 210, (208,), q6_k),
}


def random_blocks(kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of random bits whose scales are ordinary numbers."""
    size, num_bytes, halves, _ = BLOCKS[kind]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
    for at in halves:
        scale = rng.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_quantised_blocks_mean_what_their_format_says(tmp_path: Path, kind: str) -> None:
    _, num_bytes, _, decode = BLOCKS[kind]
    raw = random_blocks(kind, 5, 512)
    tensors = random_tensors("llama", 265) | {"blk.0.ffn_down.weight": raw}
    folder = converted(write_gguf(tmp_path / "m.gguf", tensors=tensors, kinds={"blk.0.ffn_down.weight": kind}))
    found = Weights(folder)["model.layers.0.mlp.down_proj.weight"]
    expected = [value for block in raw.reshape(-1, num_bytes) for value in decode(block.tobytes())]
    assert found.shape == (5, 512)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy().reshape(-1), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_keeps_its_bytes(tmp_path: Path, kind: str) -> None:
    values = random_tensors("llama", 265)
    matrices = {name for name, value in values.items() if value.ndim == 2}
    quantise = gguf.GGMLQuantizationType[kind]
    tensors = {name: gguf.quantize(value, quantise) if name in matrices else value for name, value in values.items()}
    folder = converted(write_gguf(tmp_path / "m.gguf", tensors=tensors, kinds=dict.fromkeys(matrices, kind)))
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    weights = Weights(folder)
    expected = torch.from_numpy(values["blk.3.attn_v.weight"]).to(dtype)
    assert torch.equal(weights["model.layers.3.self_attn.v_proj.weight"], expected)
    assert weights["model.norm.weight"].dtype == torch.float32
    assert read_config(folder)["dtype"] == str(dtype).removeprefix("torch.")


def test_permuted_rows_move_whole_quantised_blocks(tmp_path: Path) -> None:
    values = random_tensors("llama", 265)["blk.0.attn_k.weight"]
    quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    tensors = random_tensors("llama", 265) | {"blk.0.attn_k.weight": quantised}
    folder = converted(write_gguf(tmp_path / "m.gguf", tensors=tensors, kinds={"blk.0.attn_k.weight": "Q8_0"}))
    found = Weights(folder)["model.layers.0.self_attn.k_proj.weight"].numpy()
    plain = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    # Row (pair p, half h) of a head was stored at 2 p + h and belongs at p + h * pairs.
    pairs = HEAD_DIM // 2
    for row in range(KV_HEADS * HEAD_DIM):
        head, inside = divmod(row, HEAD_DIM)
        np.testing.assert_array_equal(found[head * HEAD_DIM + inside // 2 + inside % 2 * pairs], plain[row])


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(write_gguf(tmp_path / "m.gguf"), tmp_path / "out", lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(info.num_bytes for info in Weights(tmp_path / "out").infos.values())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_unsupported_type_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    tensors = random_tensors("llama", 265) | {"blk.0.ffn_down.weight": np.zeros((HIDDEN, 84), np.uint8)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, kinds={"blk.0.ffn_down.weight": "Q2_K"})
    with pytest.raises(ModelError, match="Q2_K") as caught:
        convert(path, tmp_path / "out")
    assert all(kind in str(caught.value) for kind in ALLOWED_TYPES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general__architecture": "qwen4"}, "qwen4.*qwen3"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama__embedding_length": "wide"}, "llama.embedding_length is 'wide'"),
        ({"llama__block_count": LAYERS - 1}, "blk.6.*6 layers"),
        ({"llama__rope__dimension_count": 8}, "8 of 16"),
        ({"tokenizer__ggml__pre": "smollmm"}, "smollmm.*'smollm'"),
        ({"tokenizer__ggml__pre": "default"}, "'default'.*Hugging Face folder"),
        ({"tokenizer__ggml__model": "bert"}, "bert.*gpt2"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.scores"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": [1.0]}, "no list of 265 numbers"),
        ({"tokenizer__ggml__eos_token_id": 100000}, "eos_token_id is 100000"),
        ({"tokenizer__ggml__merges": ["no such"]}, "merges"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "2 token types"),
    ],
)
def test_metadata_that_cannot_work_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(ModelError, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_unknown_tensor_is_never_dropped(tmp_path: Path) -> None:
    tensors = random_tensors("llama", 265) | {"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        converted(write_gguf(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"GGUF", b"not a model at all, however long it may be", b"GGUF\0\0\0\3"]
)
def test_what_is_no_gguf_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        read(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read(tmp_path / "none.gguf")


def test_every_truncation_is_found_before_any_tensor_is_read(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    short = tmp_path / "short.gguf"
    for size in [*range(0, 2000, 13), *range(2000, len(whole) - 1, len(whole) // 40), len(whole) - 1]:
        short.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"{size:,}"):
            read(short)


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    if not (folder / "m.gguf").exists():
        write_gguf(folder / "m.gguf")
    content = bytearray((folder / "m.gguf").read_bytes())
    header = len(content) - sum(tensor.nbytes for tensor in random_tensors("llama", 265).values())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (folder / "damaged.gguf").write_bytes(content)
    with contextlib.suppress(ModelError):  # a change that leaves it readable is fine as well
        read(folder / "damaged.gguf")


# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer_of(tmp_path: Path, **changes: Any) -> Tokenizer:
    return Tokenizer(converted(write_gguf(tmp_path / "m.gguf", tokenizer=byte_level_metadata() | changes)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("gpt-2", "ab 123", ["ab", " 1", "2", "3"]),
        ("gpt-2", "123", ["123"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("llama-bpe", " 123", [" ", "123"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("tekken", "aAb12", ["a", "Ab", "1", "2"]),
        ("gpt-4o", "aAb'S1231", ["a", "Ab", "'", "S", "123", "1"]),
        ("mpt", "ab 123", ["ab", " 1", "2", "3"]),
        ("refact", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("dbrx", "ab 1231", ["ab", " ", "123", "1"]),
        ("chatglm-bpe", "1231", ["123", "1"]),
        ("falcon", "1231 12", ["123", "1", " 1", "2"]),
        ("falcon", "ab123", ["ab", "123"]),
        ("bloom", "ab123 1", ["ab", "123", " 1"]),
        ("bloom", "a,b", ["a", ",", "b"]),
    ],
)
def test_text_is_split_as_the_file_names_it(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of(tmp_path, pre=pre), text) == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("falcon", "a<=b: 12345 x1234", ["a", "<=", "b", ":", " ", "123", "45", " x", "123", "4"]),
        ("falcon", "it's 12", ["it", "'", "s", " 12"]),
        ("bloom", "so, (it) is 12,5", ["so", ", (", "it", ")", " is", " 12", ",", "5"]),
        ("gpt-4o", "HTTPServer don't 2025", ["HTTPServer", " don't", " ", "202", "5"]),
        ("dbrx", "don't 2025", ["don", "'t", " ", "202", "5"]),
        ("olmo", "don't 2025", ["don", "'t", " 2025"]),
        ("starcoder", "don't 25", ["don", "'t", " ", "2", "5"]),
    ],
)
def test_published_rules_split_text_so(pre: str, text: str, expected: list[str]) -> None:
    """Before merging, in the text's own characters."""
    found = SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == expected


def test_qwen2_composes_characters_and_others_do_not(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    assert pieces_text(tokenizer_of(tmp_path, pre="qwen2"), decomposed) == "\u00e9"
    assert pieces_text(tokenizer_of(tmp_path, pre="smollm"), decomposed) == decomposed


def pieces_text(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text))


def test_control_tokens_are_special_and_user_defined_ones_are_whole_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    first = tokenizer.vocab_size - len(SPECIALS)
    assert tokenizer.special_ids == {first, first + 1, first + 2}
    assert tokenizer.encode("".join(SPECIALS)) == [first, first + 1, first + 2, first + 3]
    assert tokenizer.decode([first, first + 3]) == "<think>"
    assert tokenizer.bos_id == first + 1
    assert tokenizer.eos_ids == {first, first + 2}  # <|endoftext|> ends a text as <|im_end|> does


def test_eot_and_eom_end_a_chat_as_well(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokenizer=byte_level_metadata() | {"eot_token_id": 5, "eom_token_id": 6})
    ids = json.loads((converted(path) / "generation_config.json").read_text())["eos_token_id"]
    assert ids[1:3] == [5, 6]


@pytest.mark.parametrize("adds", [True, False])
def test_bos_goes_in_front_when_the_file_says_so(tmp_path: Path, adds: bool) -> None:
    tokenizer = tokenizer_of(tmp_path, add_bos_token=adds)
    assert (tokenizer.encode("ab")[0] == tokenizer.bos_id) == adds
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != tokenizer.bos_id


def test_a_sentencepiece_vocabulary_reads_text_bytes_and_bos(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    tensors = random_tensors("llama", len(metadata["tokens"]))
    tokenizer = Tokenizer(converted(write_gguf(tmp_path / "m.gguf", tensors=tensors, tokenizer=metadata)))
    ids = tokenizer.encode("hi bo é")
    assert [metadata["tokens"][i] for i in ids] == ["<s>", "▁hi", "▁bo", "▁", "<0xC3>", "<0xA9>"]
    assert b"".join(map(tokenizer.token_bytes, ids[1:])).decode() == " hi bo é"
    assert tokenizer.decode(ids) == "hi bo é"
    assert tokenizer.eos_ids == {2}


def spelled_metadata(**flags: Any) -> dict[str, Any]:
    """A vocabulary of all pieces of some words, the likelier the longer and the earlier."""
    words = ["\u2581the", "\u2581there", "\u2581here", "\u2581these", "heresy", "\u2581\u2581", "\u2581sees", "easy"]
    letters = dict.fromkeys(letter for word in words for letter in word)
    pieces = {word[i:j]: None for word in words for i in range(len(word)) for j in range(i + 2, len(word) + 1)}
    found = [*letters, *sorted(pieces, key=len)]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "model": "llama",
        "tokens": [*first, *found],
        "scores": [0.0] * len(first) + [-float((i * 7919) % 1009) for i in range(len(found))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(found),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **flags,
    }


TEXTS = ("the heresy there", "  these  sees\nhere is \u00e9asy", "x", "\U0001f600 the", "here</s>these", "")


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(("architecture", "has_prefix"), [("llama", True), ("gemma3", False)])
def test_sentencepiece_merges_are_those_of_transformers(tmp_path: Path, architecture: str, has_prefix: bool) -> None:
    metadata = spelled_metadata(add_space_prefix=has_prefix)
    if architecture == "gemma3":  # whose ids are in the order of scores, which transformers relies on
        metadata["scores"] = [-float(i) for i in range(len(metadata["tokens"]))]
    tensors = random_tensors(architecture, len(metadata["tokens"]))
    path = write_gguf(tmp_path / "m.gguf", architecture, tensors=tensors, tokenizer=metadata)
    ours, theirs = (
        Tokenizer(converted(path)),
        transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        expected = text.removeprefix(" ") if has_prefix else text  # a text that begins with a space gets none in front
        assert ours.decode(ours.encode(text)) == expected.replace("</s>", "")


def test_merges_go_by_score_and_not_by_length(tmp_path: Path) -> None:
    """What sentencepiece does, one pair of the highest score at a time, on all texts of a few letters."""
    metadata = spelled_metadata()
    path = write_gguf(tmp_path / "m.gguf", tensors=random_tensors("llama", len(metadata["tokens"])), tokenizer=metadata)
    tokenizer = Tokenizer(converted(path))
    scores = dict(zip(metadata["tokens"], metadata["scores"], strict=True))
    for text in ("these", "here sees easy", "theresy", "hheerree", "seeseasy"):
        parts = list("\u2581" + text.replace(" ", "\u2581"))
        while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        assert [metadata["tokens"][i] for i in tokenizer.encode(text)[1:]] == parts
