"""Tiny random models of transformers, and small tokenizers that are trained on the spot."""

import torch

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SLIDING = {"sliding_window": 5}  # tokens
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
FAMILIES = {  # model_type: its config
    "gpt2": GPT2 | {"bos_token_id": 0, "eos_token_id": 0},
    "gpt_neox": COMMON,
    "llama": COMMON | GROUPED,
    "mistral": COMMON | GROUPED | SLIDING,
    "qwen2": COMMON | {"num_key_value_heads": 1},
    "qwen3": COMMON | GROUPED | {"head_dim": 12},
    "gemma2": COMMON
    | GROUPED
    | SLIDING
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3_text": COMMON
    | GROUPED
    | SLIDING
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
LINEAR = ("linear_num_key_heads", "linear_num_value_heads")
LINEAR += ("linear_key_head_dim", "linear_value_head_dim")
OTHERS = {
    "qwen3_next": COMMON  # a hybrid
    | GROUPED
    | dict.fromkeys(LINEAR, 4)
    | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    | {"shared_expert_intermediate_size": 8}
    | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    # without transformers' AttentionInterface
    "gpt_neo": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "window_size": 5,
        "attention_types": [[["global", "local", "global"], 1]],
    },
}
# Sizes of qwen3_next, with attention in the layers 1 and 3.
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
NO_SDPA = ("bloom", "gemma2", "gpt_neo")  # gemma2: because of its soft caps


def foreign_model(family: str, attention: str | None = None, **changes: object):
    """Returns a model of transformers with random weights, large enough that its attention is not
    uniform, in eval mode. attention: its attention implementation; None: sdpa if it has it."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # of save_pretrained
    attention = attention or ("eager" if family in NO_SDPA else "sdpa")
    config = AutoConfig.for_model(family, **(FAMILIES | OTHERS).get(family, COMMON) | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.eval()


WORDS = "The bell rang twice, and nobody came. Là-bas: 語 and 日本 😀, «naïve» 12 345.\n\tThe fox\n"


def byte_level_tokenizer(vocab_size: int = 320, **special: str):
    """Returns a byte-level BPE tokenizer of transformers, as GPT-2's."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 3, vocab_size, special_tokens=[end], show_progress=False)
    special = special or {"bos_token": end, "eos_token": end}
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **special)


def sentencepiece_tokenizer(vocab_size: int = 400):
    """Returns a tokenizer of transformers as Llama's: pieces, bytes of others, <s> in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pieces.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = [character for character in sorted({*WORDS}) if ord(character) < 256]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=first[:3],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pieces.train_from_iterator(["The bell rang twice, and nobody came."] * 3, trainer)
    # bytes follow the special tokens, as ordinary tokens
    import json

    content = json.loads(pieces.to_str())
    known = list(content["model"]["vocab"])
    names = [*first, *(name for name in known if name not in first)]
    content["model"]["vocab"] = {name: number for number, name in enumerate(names)}
    pieces = Tokenizer.from_str(json.dumps(content))
    pieces.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **special)
