"""Writes a model to a GGUF file, the format of llama.cpp and Ollama, with the package gguf.

The file has the weights in fp32, in the layout of GPT-2 in llama.cpp, and the tokenizer. For
llama.cpp the context length is the number of positions, so that untrained ones are not written.
"""

import contextlib
import json
from pathlib import Path

from clearhead.models.huggingface import REQUIRED, hf_tensors
from clearhead.models.pretrained import PretrainedModel
from clearhead.tokens.tokenizer_json import to_json

# Names of our patterns in llama.cpp (tokenizer.ggml.pre). It refuses a file with an unknown name.
PRE_TOKENIZERS = {"gpt2": "gpt-2", "qwen35": "qwen35"}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # llama.cpp has Linear's layout


def write(pretrained: PretrainedModel, file: Path) -> None:
    """Writes the file. Raises ImportError without the package, CheckpointError, OSError."""
    import gguf

    c, tokenizer = pretrained.model.config, pretrained.tokenizer
    arch = gguf.MODEL_ARCH.GPT2
    with contextlib.closing(gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])) as writer:
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_context_length(pretrained.window)
        writer.add_embedding_length(c.emb_dim)
        writer.add_feed_forward_length(4 * c.emb_dim)
        writer.add_block_count(c.num_layers)
        writer.add_head_count(c.num_heads)
        writer.add_layer_norm_eps(REQUIRED["layer_norm_epsilon"])

        model = json.loads(to_json(tokenizer))["model"]
        unused = [f"[PAD{number}]" for number in range(tokenizer.n_vocab, c.vocab_size)]
        types = [gguf.TokenType.NORMAL] * tokenizer.n_vocab
        types += [gguf.TokenType.UNUSED] * len(unused)
        for number in tokenizer.special.values():
            types[number] = gguf.TokenType.CONTROL
        writer.add_tokenizer_model("gpt2")  # byte-level BPE
        writer.add_tokenizer_pre(PRE_TOKENIZERS[tokenizer.pattern])
        writer.add_token_list([*model["vocab"], *unused])
        writer.add_token_types(types)
        # The list must not be empty: for bytes it has a pair that no text contains.
        pairs = model["merges"] or [[tokenizer.end, tokenizer.end]]
        writer.add_token_merges([" ".join(pair) for pair in pairs])
        for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
            add(tokenizer.eot_token)
        writer.add_add_bos_token(False)  # as generate.py and transformers

        names = gguf.get_tensor_name_map(arch, c.num_layers)
        for name, tensor in hf_tensors(pretrained.model).items():
            tensor = tensor.T if name.endswith(CONV1D) else tensor
            tensor = tensor[: pretrained.window] if "wpe" in name else tensor
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
