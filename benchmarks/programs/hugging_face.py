# SPDX-License-Identifier: Apache-2.0
"""Language, vision and speech models of transformers, in Flax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import (
    Collection,
    Made,
    Program,
    both,
    cross_entropy,
    filled,
    gradient,
    integers,
    normal,
)

_WORDS = 8192
_STEPS = 4


def _model(name: str, config: Any, dtype: Any, **options: Any) -> tuple[Any, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    of = getattr(transformers, f"Flax{name}")
    model = of(config, dtype=jnp.dtype(dtype), _do_init=False, **options)
    shapes = jax.eval_shape(
        lambda key: model.init_weights(key, model.input_shape), jax.random.key(0)
    )
    return model, filled(shapes, dtype)


def _gpt2(dtype: Any) -> tuple[Any, Any]:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=_WORDS, n_layer=4, n_positions=256)
    return _model("GPT2LMHeadModel", config, dtype)


def _long_gpt2(dtype: Any) -> Made:
    from transformers import GPT2Config

    length = 2048
    config = GPT2Config(vocab_size=_WORDS, n_layer=1, n_positions=length)
    model, p = _model("GPT2Model", config, dtype)
    words = integers(_WORDS, 1, length)
    return lambda p, words: model(words, params=p).last_hidden_state, (p, words)


def _causal(name: str, dtype: Any, **sizes: Any) -> tuple[Any, Any]:
    import transformers

    of = getattr(transformers, f"{name}Config")
    config = of(vocab_size=_WORDS, max_position_embeddings=256, **sizes)
    return _model(f"{name}ForCausalLM", config, dtype)


def _llama(dtype: Any) -> tuple[Any, Any]:
    return _causal(
        "Llama",
        dtype,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
    )


def _gemma(dtype: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "head_dim": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1}
    return _causal("Gemma", dtype, num_hidden_layers=3, **sizes, **heads)


def _gpt_neo(dtype: Any) -> tuple[Any, Any]:
    attends = [[["global", "local"], 1]]
    sizes = {"hidden_size": 512, "num_heads": 8, "num_layers": 2}
    return _causal("GPTNeo", dtype, attention_types=attends, **sizes)


def _roberta(dtype: Any) -> tuple[Any, Any]:
    from transformers import RobertaConfig

    config = RobertaConfig(vocab_size=_WORDS, num_hidden_layers=3)
    return _model("RobertaForMaskedLM", config, dtype)


def _logits(made: Callable[[Any], Any], rows: int, length: int) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        model, p = made(dtype)
        words = integers(_WORDS, rows, length)
        return lambda p, words: model(words, params=p).logits, (p, words)

    return make


def _learns(made: Callable[[Any], Any], rows: int, length: int) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        model, p = made(dtype)

        def loss(p: Any, words: Any) -> Any:
            return cross_entropy(model(words, params=p).logits[:, :-1], words[:, 1:])

        return jax.grad(loss), (p, integers(_WORDS, rows, length))

    return make


def _decodes(made: Callable[[Any], Any], rows: int) -> Callable[..., Made]:
    """Logits of the next words, one after the other, in a cache half full."""
    length = 256

    def make(dtype: Any) -> Made:
        model, p = made(dtype)
        shapes = jax.eval_shape(lambda: model.init_cache(rows, length))
        cache = jax.tree.map(
            lambda x: x if x.ndim else jnp.int32(length // 2), filled(shapes, dtype)
        )

        def decode(p: Any, cache: Any, words: Any) -> Any:
            mask = jnp.ones((rows, length), jnp.int32)

            def step(cache: Any, given: Any) -> Any:
                words, position = given
                positions = jnp.full((rows, 1), position)
                out = model(words[:, None], mask, positions, params=p,
                            past_key_values=cache)  # fmt: skip
                return out.past_key_values, out.logits[:, 0]

            positions = length // 2 + jnp.arange(_STEPS)
            return jax.lax.scan(step, cache, (words, positions))[1]

        return decode, (p, cache, integers(_WORDS, _STEPS, rows))

    return make


def _bert(dtype: Any) -> Made:
    from transformers import BertConfig

    config = BertConfig(vocab_size=_WORDS, num_hidden_layers=4)
    model, p = _model("BertModel", config, dtype)
    words = integers(_WORDS, 2, 64)
    return lambda p, words: model(words, params=p).pooler_output, (p, words)


def _bart(dtype: Any) -> Made:
    from transformers import BartConfig

    config = BartConfig(
        vocab_size=_WORDS, d_model=512, encoder_layers=3, decoder_layers=3,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=128,
    )  # fmt: skip
    model, p = _model("BartForConditionalGeneration", config, dtype)

    def loss(p: Any, words: Any) -> Any:
        return cross_entropy(
            model(words, decoder_input_ids=words, params=p).logits, words
        )

    return jax.grad(loss), (p, integers(_WORDS, 2, 64))


def _vit(dtype: Any) -> Made:
    from transformers import ViTConfig

    return _sees("ViTModel", ViTConfig(num_hidden_layers=3), dtype)


def _dino(dtype: Any) -> Made:
    from transformers import Dinov2Config

    config = Dinov2Config(num_hidden_layers=3, image_size=224)
    return _sees("Dinov2Model", config, dtype)


def _sees(name: str, config: Any, dtype: Any) -> Made:
    model, p = _model(name, config, dtype)
    x = normal(1, 3, 224, 224, dtype=dtype)
    return lambda p, x: model(x, params=p).last_hidden_state, (p, x)


def _whisper(dtype: Any) -> Made:
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=_WORDS,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        max_source_positions=400,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model, p = _model(
        "WhisperForConditionalGeneration", config, dtype, input_shape=(1, 80, 800)
    )

    def forward(p: Any, sound: Any, words: Any) -> Any:
        return model(sound, decoder_input_ids=words, params=p).logits

    return forward, (p, normal(1, 80, 800, dtype=dtype), integers(_WORDS, 1, 16))


def _wav2vec2(dtype: Any) -> Made:
    from transformers import Wav2Vec2Config

    config = Wav2Vec2Config(
        num_hidden_layers=2, do_stable_layer_norm=True, feat_extract_norm="layer"
    )
    model, p = _model("Wav2Vec2Model", config, dtype)
    x = normal(1, 16000, dtype=dtype)
    return lambda p, x: model(x, params=p).last_hidden_state, (p, x)


def _resnet18(dtype: Any) -> tuple[Any, Any]:
    from transformers import ResNetConfig

    config = ResNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return _model("ResNetForImageClassification", config, dtype)


def _regnet(dtype: Any) -> tuple[Any, Any]:
    from transformers import RegNetConfig

    return _model(
        "RegNetForImageClassification", RegNetConfig(depths=[1, 2, 4, 1]), dtype
    )


def _classifies(
    made: Callable[[Any], Any], rows: int, learns: bool = False
) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        model, p = made(dtype)
        x = normal(rows, 3, 224, 224, dtype=dtype)

        def forward(p: Any, statistics: Any, x: Any) -> Any:
            given = {"params": p, "batch_stats": statistics}
            out = model(x, params=given, train=learns)
            return (out[0] if learns else out).logits

        f = gradient(forward) if learns else forward
        return f, (p["params"], p["batch_stats"], x)

    return make


COLLECTION = Collection(
    ("transformers", "flax"),
    (
        *both("GPT-2, 128 words", _logits(_gpt2, 1, 128)),
        *both("GPT-2, 1 layer, 2048 words", _long_gpt2),
        *both("GPT-2, gradient, 2x64 words", _learns(_gpt2, 2, 64)),
        *both("GPT-2, decode, 1 row", _decodes(_gpt2, 1)),
        *both("GPT-2, decode, 8 rows", _decodes(_gpt2, 8)),
        *both("Llama, decode, 1 row", _decodes(_llama, 1)),
        *both("Llama, decode, 8 rows", _decodes(_llama, 8)),
        Program("Llama, 64 words", _logits(_llama, 1, 64), "bfloat16"),
        Program("Gemma, 32 words", _logits(_gemma, 1, 32), "bfloat16"),
        Program("GPT-Neo, gradient, 128 words", _learns(_gpt_neo, 1, 128)),
        Program("RoBERTa, gradient, 4x32 words", _learns(_roberta, 4, 32), "bfloat16"),
        Program("BERT, 2x64 words", _bert),
        Program("BART, gradient, 2x64 words", _bart),
        *both("ViT, batch 1", _vit),
        Program("DINOv2, batch 1", _dino),
        *both("Whisper, 8 seconds", _whisper),
        Program("wav2vec 2.0, 1 second", _wav2vec2),
        *both("ResNet-18, batch 1", _classifies(_resnet18, 1)),
        Program("ResNet-18, gradient, batch 2", _classifies(_resnet18, 2, True)),
        Program("RegNet, batch 1", _classifies(_regnet, 1)),
    ),
)
