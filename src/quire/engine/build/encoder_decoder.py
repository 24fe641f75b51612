"""Settings of encoder-decoder models: what they cannot be combined with, and the limits of their encoder."""

from dataclasses import replace

from quire.core.config import EngineConfig, ModelConfig
from quire.core.encoder_input import EncoderInput
from quire.core.errors import ConfigError
from quire.weights.hyperparameters import first_token_id
from quire.weights.source import Source


def encoder_decoder_config(
    config: EngineConfig, max_model_len: int, usual_limits: tuple[int, int]
) -> EngineConfig:
    """A step that is not limited by the settings holds the longest prompt beside all decodes: an encoder takes its
    input in one step. Raises ConfigError for settings that these models cannot have."""
    memory = config.memory
    refused = {
        "pin_prefix": memory.pin_prefix,
        f"role={memory.role!r}": memory.role != "both",
        "cpu_offload_gb": memory.cpu_offload_gb,
        "weights_memory_gb": memory.weights_memory_gb is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name}: not available for encoder-decoder models: leave it out")
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    max_num_seqs, max_tokens = usual_limits
    scheduler = replace(
        config.scheduler, max_num_batched_tokens=max(max_tokens, max_model_len + max_num_seqs)
    )
    return replace(config, scheduler=scheduler)


def encoder_input(
    model: ModelConfig, source: Source, block_size: int, max_model_len: int, max_num_batched_tokens: int
) -> EncoderInput | None:
    """None for a decoder. generation_config.json has precedence over config.json."""
    encoder, generation = model.encoder, source.generation_config
    if encoder is None:
        return None
    start = first_token_id(generation, "decoder_start_token_id")
    forced = first_token_id(generation, "forced_bos_token_id")
    if forced is None:
        forced = first_token_id(model.hf, "forced_bos_token_id")
    first = encoder.decoder_start if start is None else (start,)
    decoder_start = first if forced is None else (*first, forced)
    for token_id in (*decoder_start, encoder.pad_token_id):
        if token_id >= model.vocab_size:
            raise ConfigError(
                f"decoder_start_token_id, forced_bos_token_id or pad_token_id is {token_id}, outside the vocabulary of "
                f"{model.vocab_size}: correct config.json or generation_config.json"
            )
    room = min(max_model_len - len(decoder_start) - 1, max_num_batched_tokens) // block_size * block_size
    if room < 1:
        raise ConfigError(
            f"max_model_len={max_model_len} and max_num_batched_tokens={max_num_batched_tokens} leave no block of "
            f"{block_size} tokens for the encoder's input: raise them"
        )
    return replace(encoder, decoder_start=decoder_start, max_tokens=min(encoder.max_tokens, room))
